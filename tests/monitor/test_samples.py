"""Sample pages: what is chosen, what is written, what hostile text can do to it (nothing)."""

import io
import json

from trivet.monitor import Monitor
from trivet.monitor.files import read_lines
from trivet.monitor.samples import choose, fenced, markdown, record, shorten, split
from trivet.monitor.terminal import make_console
from trivet.types import Message, Part, Pending, Rollout, Scored, Task, Termination, ToolCall, Trace, Unscored


def rollout(task="t1", value=1.0, answer="42", attempt=0, role="train", **options):
    opening = Task(
        env="math",
        messages=(Message("user", f"question {task}"),),
        id=task,
        payload={"answer": "42"},
        source="gsm",
    )
    trace = Trace()
    trace.add(-1, [1, 2])
    trace.add_sampled(0, [3, 4, 5], [-0.1] * 3, 0)
    reward = options.pop("reward", None) or Scored(value, {"correct": value, "length": -0.1})
    messages = options.pop("messages", [*opening.messages, Message("assistant", answer)])
    return Rollout(
        opening, trace, reward, Termination.FINISHED, attempt=attempt, role=role, messages=messages, **options
    )


def monitor(folder, **options):
    return Monitor(folder, console=make_console(io.StringIO(), 80), **options)


def test_pages_when_due(tmp_path):
    with monitor(tmp_path, samples_every=5, samples=2) as m:
        m.stage("rl")
        written = [bool(m.samples(step, [rollout(f"t{i}") for i in range(4)])) for step in range(1, 12)]
    assert [i + 1 for i, w in enumerate(written) if w] == [1, 5, 10]
    assert len(read_lines(tmp_path / "samples/rl/step_000005.jsonl")) == 2


def test_never_means_never_but_force(tmp_path):
    with monitor(tmp_path, samples_every=0) as m:
        m.stage("rl")
        assert m.samples(1, [rollout()]) == []
        assert m.samples(1, [rollout(role="eval")]) == []
        assert m.samples(1, []) == []
        assert [p.name for p in m.samples(1, [rollout()], force=True)] == ["step_000001.md"]


def test_page_shows_what_matters(tmp_path):
    with monitor(tmp_path) as m:
        m.stage("rl")
        (page,) = m.samples(1, [rollout(answer="it is 42", value=0.9)])
    text = page.read_text()
    for part in (
        "question t1",
        "it is 42",
        "0.9 (correct 0.9, length -0.1)",
        "finished, 3 tokens",
        '"answer": "42"',
    ):
        assert part in text
    (sample,) = read_lines(page.with_suffix(".jsonl"))
    assert sample["answer"] == [{"role": "assistant", "content": "it is 42"}]
    assert sample["prompt"] == [{"role": "user", "content": "question t1"}]
    assert sample["reward"] == {"kind": "scored", "value": 0.9, "parts": {"correct": 0.9, "length": -0.1}}
    assert sample["tokens"] == 3


def test_evaluations_have_their_own_page_and_show_the_same_tasks_again(tmp_path):
    tasks = [f"t{i:02d}" for i in range(20)]
    with monitor(tmp_path, samples=3) as m:
        m.stage("sft")
        m.samples(0, [rollout(t, value=0.0, role="eval") for t in tasks] + [rollout("x")])
    with monitor(tmp_path, samples=3) as m:  # another process, another stage
        m.stage("rl")
        m.samples(
            7, [rollout(t, value=float(t > "t10"), role="eval", attempt=a) for t in tasks for a in (1, 0)]
        )
    first = read_lines(tmp_path / "samples/sft/step_000000_eval.jsonl")
    last = read_lines(tmp_path / "samples/rl/step_000007_eval.jsonl")
    assert [s["task"] for s in first] == [s["task"] for s in last]
    assert {s["attempt"] for s in last} == {0}
    assert (tmp_path / "samples/sft/step_000000.jsonl").exists()


def test_two_tasksets_share_a_page(tmp_path):
    with monitor(tmp_path, samples=2) as m:
        m.stage("rl")
        m.samples(3, [rollout("a1", role="eval"), rollout("a2", role="eval")])
        m.samples(3, [rollout("b1", role="eval")])
        m.samples(3, [rollout("a1", role="eval", answer="again")])
    page = read_lines(tmp_path / "samples/rl/step_000003_eval.jsonl")
    assert [s["task"] for s in page] == ["a2", "b1", "a1"]
    assert page[-1]["answer"][0]["content"] == "again"


def test_rewind_deletes_later_pages(tmp_path):
    with monitor(tmp_path, samples_every=1) as m:
        for stage in ("sft", "rl"):
            m.stage(stage)
            for step in (1, 2, 3):
                m.log(step, {"train/loss": 1.0})
                m.samples(step, [rollout(), rollout(role="eval")])
        m.rewind("sft", 2)
    names = sorted(p.relative_to(tmp_path / "samples").as_posix() for p in tmp_path.glob("samples/*/*.md"))
    assert names == [f"sft/step_00000{s}{e}.md" for s in (1, 2) for e in ("", "_eval")]
    assert not list(tmp_path.glob("samples/rl/*"))


def test_choose_spreads_over_scores():
    many = [rollout(f"t{i}", value=i / 10) for i in range(11)]
    assert [r.score for r in choose(many, 3)] == [1.0, 0.5, 0.0]
    assert len(choose(many, 50)) == 11
    one_task = [rollout("t", value=v, attempt=i) for i, v in enumerate((0.0, 1.0, 0.5))]
    assert len(choose(one_task, 2)) == 2
    unscored = rollout("u", reward=Unscored("timeout"))
    assert unscored in choose([*many, unscored], 3)
    assert choose([], 3) == []


def test_system_prompt_in_front_belongs_to_the_prompt():
    r = rollout(
        messages=[Message("system", "be brief"), Message("user", "question t1"), Message("assistant", "42")]
    )
    prompt, answer = split(r)
    assert [m.role for m in prompt] == ["system", "user"]
    assert [m.text for m in answer] == ["42"]
    prompt, answer = split(rollout(messages=[]))
    assert ([m.role for m in prompt], answer) == (["user"], [])


def test_all_kinds_of_message_and_reward():
    call = Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("add", {"a": 1}),))
    media = Message("tool", (Part("text", "seen"), Part("image", attachment="abc")))
    rollouts = [
        rollout(messages=[Message("user", "q"), call, media], reward=Pending(5.0)),
        rollout(reward=Unscored("timeout", "5 s")),
        rollout(messages=[Message("user", "q")]),
    ]
    text = markdown("rl", 1, "train", [record("rl", 1, r) for r in rollouts])
    for part in (
        '-> add({"a": 1})',
        "<reasoning>\nhm",
        "[image abc]",
        "pending",
        "unscored: timeout (5 s)",
        "**answer**: none",
    ):
        assert part in text


def test_hostile_text_stays_inside_its_block():
    answer = "```\n# not a heading\n`````\n\x1b[31m <script>"
    block = fenced(answer)
    assert block.startswith("``````text\n")
    assert block.endswith("\n``````")
    assert "\x1b" not in block
    r = rollout("a`\n# b", answer=answer, reward=Unscored("x`\n# c"))
    lines = markdown("rl", 1, "train", [record("rl", 1, r)]).splitlines()
    fence, headings = 0, []  # ticks of the block we are in
    for line in lines:
        ticks = len(line) - len(line.lstrip("`"))
        if ticks >= max(3, fence):
            fence = 0 if fence else ticks
        elif not fence and line.startswith("#"):
            headings.append(line)
    assert len(headings) == 2  # the page's and the sample's


def test_long_text_and_odd_payloads_are_kept_readable():
    assert shorten("x" * 10, 10) == "x" * 10
    short = shorten("a" * 600 + "b" * 600, 1000)
    assert short.startswith("a" * 500 + "\n[... 200 characters left out ...]\nb")
    r = rollout(answer="y" * 50_000)
    r.task.payload.update(bad=float("nan"), other={1, 2}, long="z" * 5000)
    sample = json.loads(json.dumps(record("rl", 1, r)), parse_constant=lambda name: 1 / 0)
    assert sample["payload"]["bad"] == "NaN"
    assert len(sample["answer"][0]["content"]) < 21_000
    assert len(sample["payload"]["long"]) < 600
