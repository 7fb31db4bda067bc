"""Which language a text is in: told by its script and, within a script, by function words.

It is deterministic, needs no model, and is good for texts of a few sentences. A text without any function
word ("ok") is in none of the languages that share a script with others.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter

_SAMPLE = 20_000  # letters of a text that are looked at
_TOKEN = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")

# Unicode blocks: (first, last, script). Marks of Indic scripts are letters of their block.
_BLOCKS = sorted(
    [
        (0x41, 0x5A, "latin"),
        (0x61, 0x7A, "latin"),
        (0xC0, 0x24F, "latin"),
        (0x1E00, 0x1EFF, "latin"),
        (0x370, 0x3FF, "greek"),
        (0x400, 0x52F, "cyrillic"),
        (0x530, 0x58F, "armenian"),
        (0x590, 0x5FF, "hebrew"),
        (0x600, 0x6FF, "arabic"),
        (0x750, 0x77F, "arabic"),
        (0xFB50, 0xFDFF, "arabic"),
        (0xFE70, 0xFEFF, "arabic"),
        (0x900, 0x97F, "devanagari"),
        (0x980, 0x9FF, "bengali"),
        (0xA00, 0xA7F, "gurmukhi"),
        (0xA80, 0xAFF, "gujarati"),
        (0xB80, 0xBFF, "tamil"),
        (0xC00, 0xC7F, "telugu"),
        (0xC80, 0xCFF, "kannada"),
        (0xD00, 0xD7F, "malayalam"),
        (0xE00, 0xE7F, "thai"),
        (0x10A0, 0x10FF, "georgian"),
        (0x1100, 0x11FF, "hangul"),
        (0x3040, 0x30FF, "kana"),
        (0x3400, 0x4DBF, "han"),
        (0x4E00, 0x9FFF, "han"),
        (0xAC00, 0xD7AF, "hangul"),
    ]
)
_FIRST = [block[0] for block in _BLOCKS]

# code -> (script, function words; "" where the script alone decides)
LANGUAGES: dict[str, tuple[str, frozenset[str]]] = {
    code: (script, frozenset(words.split()))
    for code, script, words in [
        (
            "en",
            "latin",
            "the of and to in is that it for was on are with as be this by not or from have you "
            "at an but they his her we i my your which can will has their if there what all when "
            "so do would our about",
        ),
        (
            "de",
            "latin",
            "der die das und ist nicht ein eine zu den mit von sich auf für im dem des auch als "
            "wie es aus werden bei oder sind ich sie wir nach einen einer wird dass kann haben "
            "hat über durch",
        ),
        (
            "fr",
            "latin",
            "le la les de des et est un une du que qui dans pour pas sur au avec ce il elle nous "
            "vous sont par plus ne se sa son mais ou cette aux leur être je c'est l'on",
        ),
        (
            "es",
            "latin",
            "el la los las de y que en un una es por con para no se su al lo como más pero sus le "
            "ha este sí porque esta entre cuando muy sin sobre también hasta hay son del",
        ),
        (
            "pt",
            "latin",
            "o a os as de e que em um uma é por com para não se seu sua ao como mais mas foi pela "
            "pelo ou quando muito nos já eu também só da do das dos na no você são isso",
        ),
        (
            "it",
            "latin",
            "il lo la gli le di e che un una è per con non si in da del della dei delle al alla "
            "nel nella come più ma anche sono questo questa sua suo o se ha i ci dove essere",
        ),
        (
            "nl",
            "latin",
            "de het een en van ik te dat die in je is niet zijn op aan met voor er maar om hem "
            "dan zou wat mijn men dit zo door over ze bij ook tot uit naar heeft worden deze",
        ),
        (
            "pl",
            "latin",
            "i w nie na z się do to jest że o jak ale po co tak za od przez jego dla już tylko "
            "przy czy lub być które który oraz jej ich są tym tego gdy",
        ),
        (
            "vi",
            "latin",
            "và của là có cho một không được trong những với các này để người khi đã tôi bạn đó "
            "như từ về ra cũng vào nhiều hoặc sẽ rất thì nó ở",
        ),
        (
            "sw",
            "latin",
            "na ya wa kwa ni la katika za kuwa hii yake cha huo huu hiyo au kama pia lakini vya "
            "watu wake sana kila baada yako hayo ili wetu yetu ambayo wao wako mimi hapa mtu moja",
        ),
        (
            "fi",
            "latin",
            "ja on ei se että oli hän mutta ovat kun niin myös kuin tai sekä jos joka ole voi sen "
            "tämä ne jotka olen minä sinä me te he olla siitä vain nyt hyvin",
        ),
        (
            "sv",
            "latin",
            "och att det som en är av för med den till inte om ett han jag men var så från vi kan "
            "när hon hade eller på har sig mycket vara",
        ),
        (
            "tr",
            "latin",
            "ve bir bu için ile da de çok ne ben gibi daha o var ama olarak kadar sonra her olan "
            "veya en mi biz sen değil yok onun",
        ),
        (
            "id",
            "latin",
            "yang dan di ini itu dengan untuk tidak dari dalam akan pada juga ke karena ada "
            "mereka saya anda kami atau oleh bisa sudah seperti adalah dapat",
        ),
        (
            "ro",
            "latin",
            "și de la în nu că o un cu pe este se din pentru mai care au sunt dar prin sau al ale "
            "lui când fi fost foarte acest această",
        ),
        (
            "ru",
            "cyrillic",
            "и в не на что это с как он к по но они для из от так его все или был я мы вы также "
            "который может при быть",
        ),
        (
            "uk",
            "cyrillic",
            "і та в у не на що це з як він до по але вони для із від так його всі або був є ми ви "
            "також й їх при",
        ),
        (
            "bg",
            "cyrillic",
            "и в не на че това с като той се по но те за от да е са му или беше също може при със "
            "ще много тази този",
        ),
        (
            "ar",
            "arabic",
            "في من على أن إلى هذا هذه لا ما عن مع التي الذي كان هو هي أو ذلك بين كل لم قد و",
        ),
        (
            "fa",
            "arabic",
            "و در به از که این را با است برای آن یک خود تا می بر هم یا شما من ما بود های",
        ),
        (
            "ur",
            "arabic",
            "کے میں کی ہے اور سے کا کو اس ہیں پر نہیں یہ بھی کہ نے ایک آپ جو ہو تھا لیے ہم",
        ),
        (
            "hi",
            "devanagari",
            "है के में की और से का को हैं पर नहीं यह भी कि ने एक आप जो हो था लिए हम इस या",
        ),
        (
            "mr",
            "devanagari",
            "आहे आणि आहेत या हे ते नाही होते तर करण्यासाठी साठी आपण मी हा ही त्या किंवा पण कुठे मध्ये आम्ही व एक तुम्ही",
        ),
        (
            "ne",
            "devanagari",
            "छ र को मा लाई हरु हो यो पनि ले न गर्न लागि छन् थियो त्यो तपाईं म हामी वा एक संग भने हुन्छ",
        ),
        *[
            (code, script, "")
            for code, script in [
                ("el", "greek"),
                ("hy", "armenian"),
                ("he", "hebrew"),
                ("bn", "bengali"),
                ("pa", "gurmukhi"),
                ("gu", "gujarati"),
                ("ta", "tamil"),
                ("te", "telugu"),
                ("kn", "kannada"),
                ("ml", "malayalam"),
                ("th", "thai"),
                ("ka", "georgian"),
                ("ko", "hangul"),
                ("ja", "kana"),
                ("zh", "han"),
            ]
        ],
    ]
}


def script_of(char: str) -> str:
    """The script of a letter, "" for what is none of a known script's."""
    code = ord(char)
    place = bisect_right(_FIRST, code) - 1
    if place >= 0 and code <= _BLOCKS[place][1] and (char.isalpha() or code >= 0x900):
        return _BLOCKS[place][2]
    return ""


def scripts(text: str) -> Counter[str]:
    """Letters by script, of the text's beginning."""
    found = Counter(script_of(char) for char in text[:_SAMPLE])
    del found[""]
    return found


def function_words(text: str, script: str) -> Counter[str]:
    """How many words of the text's beginning are function words, by language of the script."""
    # Indic vowel signs are marks, not letters: words there end at blanks and punctuation.
    beginning = text[:_SAMPLE].lower()
    tokens = (
        re.findall(r"[\u0900-\u0963\u0971-\u097f]+", beginning)
        if script == "devanagari"
        else (_TOKEN.findall(beginning.replace("\u2019", "'")))
    )
    counts = Counter(tokens)
    return Counter(
        {
            code: sum(counts[word] for word in words)
            for code, (own, words) in LANGUAGES.items()
            if own == script and words
        }
    )


def is_language(text: str, code: str) -> bool:
    """Most letters are of the language's script, and no other language of it has more function words in the
    text than this one has (at least one), where it has to share its script.

    A text without letters is in no language. Raises KeyError for an unknown code.
    """
    script, words = LANGUAGES[code]
    found = scripts(text)
    total = sum(found.values())
    if script == "kana":  # Japanese mixes in Chinese characters
        return bool(found["kana"]) and 2 * (found["kana"] + found["han"]) > total
    if script == "han" and 10 * found["kana"] > found["han"]:
        return False
    if 2 * found[script] <= total:
        return False
    if not words:
        return True
    hits = function_words(text, script)
    return 0 < hits[code] == max(hits.values())
