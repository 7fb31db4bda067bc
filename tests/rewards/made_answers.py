"""Answers made for rows of instructions: some that keep to them, some that do not, some of every sort."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SENTENCES = (
    "The garden behind the house was quiet in the morning.",
    "A small cat sat on the wall and looked at the birds.",
    "Nobody had seen the old boat since the storm of last year.",
    "We can walk along the river until the bridge is open again.",
    "There is a shop on the corner that sells bread and honey.",
    "He wrote a letter to the mayor but never got an answer.",
    "She likes to read about ships when it rains at night.",
    "Most of the trees were planted by the children of the town.",
    "You should try the soup because it is made with fresh herbs.",
    "It took them a week to find the key of the tower.",
)

# A few lines of each, written for these tests.
OTHER = {
    "ar": ("هذا البيت في المدينة القديمة. ذهبنا إلى السوق مع الأطفال من أجل الخبز. "),
    "bg": ("Това е стара къща до реката. Децата са в градината и ще играят със своето куче. "),
    "bn": ("এই বাড়িটি নদীর পাশে অবস্থিত। শিশুরা বাগানে খেলছে। "),
    "de": (
        "Das alte Haus steht an dem Fluss. Die Kinder sind im Garten und spielen mit dem Hund. Es "
        "wird heute nicht regnen. "
    ),
    "fa": ("این خانه در کنار رود است. بچه ها در باغ با سگ بازی می کنند و ما به بازار می رویم. "),
    "fi": (
        "Vanha talo on joen rannalla. Lapset ovat puutarhassa ja he leikkivät koiran kanssa. Tänään "
        "ei sada vaan aurinko paistaa. "
    ),
    "gu": ("આ ઘર નદીના કિનારે છે. બાળકો બગીચામાં રમે છે. "),
    "hi": ("यह घर नदी के किनारे पर है। बच्चे बगीचे में कुत्ते के साथ खेल रहे हैं और आज बारिश नहीं होगी। "),
    "it": (
        "La vecchia casa si trova vicino al fiume. I bambini sono nel giardino e giocano con il "
        "cane. Oggi non piove. "
    ),
    "kn": ("ಈ ಮನೆ ನದಿಯ ದಡದಲ್ಲಿದೆ. ಮಕ್ಕಳು ತೋಟದಲ್ಲಿ ಆಡುತ್ತಿದ್ದಾರೆ. "),
    "ko": ("이 집은 강 옆에 있습니다. 아이들은 정원에서 개와 함께 놉니다. "),
    "mr": ("हे जुने घर नदीच्या काठावर आहे. मुले बागेत खेळत आहेत आणि आज पाऊस नाही. "),
    "ne": ("यो पुरानो घर नदीको किनारमा छ. केटाकेटीहरु बगैंचामा खेलिरहेका छन् र आज पानी पर्दैन. "),
    "pa": ("ਇਹ ਘਰ ਨਦੀ ਦੇ ਕੰਢੇ ਹੈ। ਬੱਚੇ ਬਾਗ ਵਿੱਚ ਖੇਡ ਰਹੇ ਹਨ। "),
    "pt": (
        "A casa velha fica perto do rio. As crianças estão no jardim e brincam com o cachorro. Hoje "
        "não vai chover. "
    ),
    "ru": ("Это старый дом на берегу реки. Дети играют в саду с собакой и не хотят идти домой. "),
    "sw": (
        "Nyumba hii ya zamani iko karibu na mto. Watoto wako katika bustani na wanacheza na mbwa "
        "wao. Leo hakuna mvua. "
    ),
    "ta": ("இந்த வீடு ஆற்றின் கரையில் உள்ளது. குழந்தைகள் விளையாடுகிறார்கள். "),
    "te": ("ఈ ఇల్లు నది ఒడ్డున ఉంది. పిల్లలు తోటలో ఆడుకుంటున్నారు. "),
    "th": ("บ้านหลังนี้อยู่ริมแม่น้ำ เด็กๆ เล่นอยู่ในสวนกับสุนัข "),
    "ur": ("یہ پرانا گھر دریا کے کنارے پر ہے. بچے باغ میں کھیل رہے ہیں اور آج بارش نہیں ہوگی۔ "),
    "vi": (
        "Ngôi nhà cũ này ở bên bờ sông. Các em bé đang chơi trong vườn với con chó và hôm nay trời "
        "không mưa. "
    ),
}


def clean(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (arguments or {}).items() if value is not None}


def keeping(row: Mapping[str, Any]) -> str:
    """An answer that tries to keep to all of a row's IFEval instructions (not every set can be kept)."""
    pairs = zip(row["instruction_id_list"], row["kwargs"], strict=True)
    want: dict[str, dict[str, Any]] = {name: clean(given) for name, given in pairs}
    if "detectable_format:json_format" in want:
        return json.dumps({"title": "<<The garden>>", "text": " ".join(_body(row, want)[0])})
    sentences, extras = _body(row, want)
    text = _arranged(sentences, want)
    text = "\n".join([*extras, text])
    if "combination:repeat_prompt" in want:
        text = f"{want['combination:repeat_prompt']['prompt_to_repeat']}\n{text}"
    if "change_case:english_capital" in want:
        text = text.upper()
    if "change_case:english_lowercase" in want:
        text = text.lower()
    if "detectable_content:postscript" in want:
        text += f"\n\n{want['detectable_content:postscript']['postscript_marker']} See you soon."
    if "startend:end_checker" in want:
        text += f"\n{want['startend:end_checker']['end_phrase']}"
    if "startend:quotation" in want:
        text = f'"{text}"'
    return text


def _body(row: Mapping[str, Any], want: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(sentences, lines to begin with)."""
    if "language:response_language" in want:
        return [OTHER[want["language:response_language"]["language"]]], []
    banned = [word.lower() for word in want.get("keywords:forbidden_words", {}).get("forbidden_words", [])]
    pool = [one for one in SENTENCES if not any(word in one.lower() for word in banned)]
    words = want.get("length_constraints:number_words", {})
    limit = words.get("num_words", 60)
    count = limit // 9 + 1 if words.get("relation") == "at least" else max(1, min(6, limit // 13))
    number = want.get("length_constraints:number_sentences", {})
    if number.get("relation") == "at least":
        count = max(count, number["num_sentences"])
    elif number:
        count = max(1, min(count, number["num_sentences"] - 2))
    sentences = [pool[i % len(pool)] for i in range(count)]
    extras = []
    for word in want.get("keywords:existence", {}).get("keywords", []):
        extras.append(f"About {word} again.")
    for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        if name == "keywords:frequency" and given["relation"] == "at least":
            extras.append(" ".join([given["keyword"]] * given["frequency"]) + ".")
        if name == "keywords:letter_frequency" and given["let_relation"] == "at least":
            extras.append(" ".join([given["letter"]] * given["let_frequency"]))
        if name == "change_case:capital_word_frequency" and given["capital_relation"] == "at least":
            extras.append(" ".join(["LOUD"] * given["capital_frequency"]))
        if name == "detectable_content:number_placeholders":
            extras.append(" ".join(f"[name {i}]" for i in range(given["num_placeholders"])))
        if name == "detectable_format:number_highlighted_sections":
            extras.append(" ".join(f"*part {i}*" for i in range(given["num_highlights"])))
        if name == "detectable_format:constrained_response":
            extras.append("My answer is maybe.")
        if name == "detectable_format:title":
            extras.insert(0, "<<The garden>>")
    return sentences, extras


def _arranged(sentences: list[str], want: dict[str, dict[str, Any]]) -> str:
    if given := want.get("detectable_format:number_bullet_lists"):
        return "\n".join(f"* {sentences[i % len(sentences)]}" for i in range(given["num_bullets"]))
    if given := want.get("detectable_format:multiple_sections"):
        mark, number = given["section_spliter"], given["num_sections"]
        return "\n".join(f"{mark} {i + 1}\n{sentences[i % len(sentences)]}" for i in range(number))
    if "combination:two_responses" in want:
        return f"{sentences[0]}\n******\n{' '.join(sentences[1:]) or 'Something else.'}"
    if given := want.get("length_constraints:number_paragraphs"):
        number = given["num_paragraphs"]
        return "\n***\n".join(" ".join(sentences[i::number]) or "More." for i in range(number))
    if given := want.get("length_constraints:nth_paragraph_first_word"):
        number = given["num_paragraphs"]
        blocks = [" ".join(sentences[i::number]) or "More of it." for i in range(number)]
        blocks[given["nth_paragraph"] - 1] = f"{given['first_word'].capitalize()} {blocks[0]}"
        return "\n\n".join(blocks)
    return " ".join(sentences)


def made(row: Mapping[str, Any]) -> list[str]:
    """Answers of every sort: one that keeps to the row's instructions, broken ones, other forms."""
    good = keeping(row)
    plain = " ".join(SENTENCES)
    return [
        good,
        f"Sure, here is what you asked for:\n{good}\nI hope this helps, my friend!",
        "\n".join(good.split("\n")[1:]) or "No.",
        good.upper(),
        good.lower(),
        f"**{good}**" if "\n" not in good else good.replace("*", ""),
        plain,
        plain.replace(". ", ".\n\n"),
        "# Title\n\nHi:\n\n1. One, **bold** point.\n2. Second one.\n\n- a\n- b\n* c\n\nP.S. That's all!",
        'Dr. Smith paid $3.50 at 5 p.m. today... Really? Yes! He said "go away." He left, e.g. by bus',
        '```json\n{"answer": [1, 2, "three"]}\n```',
        "My answer is yes.\n******\nMy answer is no.",
        "***\n".join(SENTENCES[:4]),
        "\n\n".join(["Weekend plans are hard.", *SENTENCES[:3]]),
        str(row.get("prompt", "")),
        "ok",
    ]
