"""Which curves are drawn: only what happened, gaps by age, shares on an axis of their own."""

from __future__ import annotations

from trivet.monitor.panels import History, panels


def drawn(*lines):
    records = [{"stage": "rl", "step": i + 1, **line} for i, line in enumerate(lines)]
    return {panel.id: panel for panel in panels(History(records))}


def names(panel):
    return [series.name for series in panel.series]


def test_gaps_by_age_are_drawn_where_ages_differ():
    one = {"train/gap": 0.1, "train/pg/gap/0": 0.1}
    assert "gap_by_age" not in drawn(one, one)
    two = one | {"train/pg/gap/3_4": 0.4, "train/pg/gap/5_up": 0.9}
    found = drawn(one, two)["gap_by_age"]
    assert names(found) == ["age 0", "age 3 to 4", "age 5 and more"]
    assert [series.last for series in found.series] == [0.1, 0.4, 0.9]
    both = drawn(two | {"train/sft/gap/0": 0.2})["gap_by_age"]
    assert names(both) == ["pg, age 0", "pg, age 3 to 4", "pg, age 5 and more", "sft, age 0"]


def test_games_of_one_turn_have_no_picture_of_turns():
    keys = [f"conduct/{who}/turns_{part}" for who in ("winners", "losers") for part in ("p50", "p90")]
    assert "turns" not in drawn(dict.fromkeys(keys, 1.0))
    found = drawn(dict.fromkeys(keys, 1.0), {**dict.fromkeys(keys, 1.0), "conduct/losers/turns_p90": 3.0})
    assert len(names(found["turns"])) == 4


def test_what_never_happened_is_no_curve():
    line = {"group/all_equal": 0.5, "group/filtered": 0.0, "explorer/lost": 0.0}
    assert names(drawn(line)["groups"]) == ["all rewards equal"]
    assert len(names(drawn(line, line | {"group/filtered": 0.1, "explorer/lost": 0.1})["groups"])) == 3


def test_both_distances_are_in_one_picture():
    found = drawn({"train/kl": 0.1, "train/ref_kl": 0.2})["kl"]
    assert names(found) == ["to the sampler", "to the reference"]


def test_shares_near_all_keep_a_readable_axis():
    low, top = drawn({"train/ess": 0.998}, {"train/ess": 1.0000001})["ess"].limits()
    assert low <= 0.9
    assert 1 < top < 1.05
    low, _ = drawn({"train/ess": 0.2}, {"train/ess": 1.0})["ess"].limits()
    assert low == 0
