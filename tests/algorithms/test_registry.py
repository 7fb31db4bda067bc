"""From a recipe's words to an algorithm; refusals say what and why."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from trivet.algorithms import (
    Algorithm,
    AlgorithmError,
    StreamSpec,
    make_part,
    prepare,
    register_algorithm,
    register_credit,
    register_mask,
    register_objective,
    registered,
    resolve,
)
from trivet.algorithms.registry import check, resolve_all
from trivet.recipe import Recipe


def test_defaults():
    algorithm = resolve("grpo")
    assert algorithm.kind == "grpo"
    assert algorithm.group_min == 2
    assert algorithm.consumes == {"rollout"}
    assert algorithm.needs == {"proximal_logp"}
    assert algorithm.annotations(1) == frozenset()
    assert algorithm.annotations(4) == {"proximal_logp"}
    assert [p.name for p in algorithm.parts] == ["group_normalised", "sequence_mean", "ppo_clip", "token_tis"]
    assert algorithm.options["tis"] == "auto"
    behaviour = resolve({"kind": "grpo", "proximal": "behaviour"})
    assert behaviour.needs == frozenset()
    assert behaviour.streams[0].corrections == ()
    sft = resolve("sft")
    assert (sft.group_min, sft.consumes, sft.modes, sft.credit) == (1, {"sft"}, {"train"}, None)
    assert registered("algorithm") == sorted(registered("algorithm"))
    assert {"sft", "grpo"} <= set(registered("algorithm"))


def test_options_reach_the_parts():
    algorithm = resolve(
        {
            "kind": "grpo",
            "credit": {"kind": "group_normalised", "std": "population"},
            "aggregation": {"kind": "fixed", "length": 64},
            "clip": [0.2, 0.28],
            "tis": [0.25, 4],
            "masks": ["truncated"],
        }
    )
    assert algorithm.credit is not None
    assert algorithm.credit.options == {"std": "population"}
    stream = algorithm.streams[0]
    assert stream.aggregation.options == {"length": 64}
    assert stream.objective.options == {"clip": (0.2, 0.28)}
    assert stream.corrections[0].options == {"bounds": (0.25, 4.0)}
    assert [m.name for m in algorithm.masks] == ["truncated"]


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("gpro", r"unknown algorithm 'gpro'; did you mean 'grpo'\?"),
        ({"kind": "grpo", "clipp": 0.1}, r"'grpo': unknown option 'clipp'; did you mean 'clip'\?"),
        ({"kind": "grpo", "credit": "mean"}, r"unknown credit 'mean'; did you mean 'mean_only'\?"),
        ({"kind": "grpo", "aggregation": "token_meen"}, "did you mean 'token_mean'"),
        (
            {"kind": "grpo", "credit": {"kind": "mean_only", "population": True}},
            "'mean_only': unknown option 'population'; known: none",
        ),
        ({"kind": "grpo", "aggregation": "fixed"}, r"aggregation 'fixed': needs option\(s\) length"),
        (
            {"kind": "grpo", "aggregation": {"kind": "fixed", "length": 0}},
            "length=0 does not fit.*greater than 0",
        ),
        ({"kind": "grpo", "proximal": "frozen"}, "proximal='frozen' does not fit.*recompute"),
        ({"kind": "grpo", "clip": "wide"}, "clip='wide' does not fit"),
        ({"kind": "grpo", "clip": -0.1}, "lower part lies in 0..1"),
        ({"kind": "grpo", "tis": [2.0, 0.5]}, "low must lie in 0..1"),
        ({"kind": "grpo", "proximal": "behaviour", "tis": [0.5, 2]}, "which is 1 everywhere"),
        ({"kind": "sft", "credit": "mean_only"}, "'sft': unknown option 'credit'"),
        ({"credit": "mean_only"}, "write a name or"),
        (["grpo"], "write a name or"),
        ("no.such:thing", "cannot be imported"),
        ("trivet.algorithms.base:NEEDS", "is not callable"),
        ("trivet.algorithms.registry:registered", "needs option"),
    ],
)
def test_refusals(spec, match):
    if match == "needs option":  # a function that is no builder
        with pytest.raises(AlgorithmError):
            resolve({"kind": spec, "role": "credit"})
        return
    with pytest.raises(AlgorithmError, match=match):
        resolve(spec)


def test_resolving_imports_no_torch():
    code = (
        "import sys; from trivet.algorithms import resolve; resolve('grpo'); resolve('sft');"
        "import trivet.algorithms.prepare; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@register_credit("test_power", needs={"value"}, group_min=3)
def power(batch, *, exponent: float = 1.0):
    return np.sign(batch.reward_N - 0.5) * abs(batch.reward_N - 0.5) ** exponent


@register_mask("test_even")
def even(batch):
    return batch.attempt_N % 2 == 0


@register_objective("test_reinforce", advantage=True)
def reinforce(x):
    return -x.weight_P * x.advantage_P * x.logp_P, {}


@register_algorithm("test_mine")
def mine(*, exponent: float = 2.0) -> Algorithm:
    """One file, no change to the trainer."""
    stream = StreamSpec(
        "pg", make_part("objective", "test_reinforce"), make_part("aggregation", "sequence_sum")
    )
    credit = make_part("credit", {"kind": "test_power", "exponent": exponent})
    return Algorithm("test_mine", (stream,), credit, masks=(make_part("mask", "test_even"),))


def test_an_algorithm_of_ones_own(batch_of):
    algorithm = resolve({"kind": "test_mine", "exponent": 3})
    assert algorithm.needs == algorithm.credit_needs == {"value"}
    assert algorithm.group_min == 3
    batch = batch_of([1.0, 0.0, 1.0])
    with pytest.raises(AlgorithmError, match=r"reads \['value'\]: annotate the batch"):
        prepare(batch, algorithm)
    batch.annotations["value"] = np.zeros(batch.tokens)
    prepared = prepare(batch, algorithm)
    assert prepared.counters["masked_tokens/test_even"] == 2
    assert prepared.streams[0].columns["advantage"][prepared.trained_T].tolist() == [0.125] * 4


@dataclass(frozen=True)
class Half:
    """A part named by its dotted path; what it needs depends on its option."""

    deep: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_logp"}) if self.deep else frozenset()

    def __call__(self, batch):
        return batch.reward_N / 2


def test_dotted_paths(tmp_path, monkeypatch):
    (tmp_path / "my_trivet_parts.py").write_text(
        "class Half:\n"
        "    def __init__(self, deep: bool = False):\n"
        "        self.needs = {'teacher_logp'} if deep else ()\n"
        "    def __call__(self, batch):\n"
        "        return batch.reward_N / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"kind": "grpo", "credit": {"kind": "my_trivet_parts:Half", "deep": True}}
    assert resolve(spec).credit_needs == {"teacher_logp"}
    assert resolve({"kind": "grpo", "credit": "my_trivet_parts:Half"}).credit_needs == frozenset()
    with pytest.raises(AlgorithmError, match="unknown option 'dep'; did you mean 'deep'"):
        resolve({"kind": "grpo", "credit": {"kind": "my_trivet_parts:Half", "dep": True}})


def test_one_file_may_be_loaded_under_two_names(tmp_path, monkeypatch):
    source = tmp_path / "credit_loaded_twice.py"
    source.write_text(
        "from trivet.algorithms import register_credit\n"
        "@register_credit('loaded_twice')\n"
        "def credit(batch):\n"
        "    return batch.reward_N\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("credit_loaded_twice")
    spec = importlib.util.spec_from_file_location("loaded_by_its_path", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_by_its_path", module)
    spec.loader.exec_module(module)
    assert resolve({"kind": "grpo", "credit": "loaded_twice"})


PARTS = """
from trivet.algorithms import register_objective

class Half:
    def __init__(self, power: int = 1):
        self.power = power
    def __call__(self, batch):
        return batch.reward_N / 2

@register_objective("objective_of_a_file", advantage=True)
def plain(x):
    return -x.weight_P * x.advantage_P * x.logp_P, {}

def bare(x):
    return -x.weight_P * x.logp_P, {}

print(6 * 7)
"""


def test_a_part_in_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    for place in ("parts.py", "./parts.py", str(tmp_path / "parts.py")):
        algorithm = resolve({"kind": "grpo", "credit": {"kind": f"{place}:Half", "power": 2}})
        assert algorithm.credit is not None
        assert algorithm.credit.options == {"power": 2}
    assert capsys.readouterr().out == "42\n"  # loaded once
    with pytest.raises(AlgorithmError, match="unknown option 'pover'; did you mean 'power'"):
        resolve({"kind": "grpo", "credit": {"kind": "parts.py:Half", "pover": 2}})
    with pytest.raises(AlgorithmError, match=r"credit 'parts.py:Halve' .*no 'Halve'; did you mean 'Half'"):
        resolve({"kind": "grpo", "credit": "parts.py:Halve"})
    with pytest.raises(AlgorithmError, match=r"no such file: .*part\.py"):
        resolve({"kind": "grpo", "credit": "part.py:Half"})
    (tmp_path / "broken.py").write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(AlgorithmError, match=r"broken.py:Half.*ZeroDivisionError: division by zero"):
            resolve({"kind": "grpo", "credit": "broken.py:Half"})


def test_a_part_named_by_its_place_keeps_its_traits(tmp_path):
    (tmp_path / "objectives.py").write_text(PARTS.replace("objective_of_a_file", "objective_of_another"))
    place = tmp_path / "objectives.py"
    assert make_part("objective", f"{place}:plain").traits == {"advantage": True}
    assert make_part("objective", f"{place}:bare").traits == {}
    stream = StreamSpec("pg", make_part("objective", f"{place}:bare"), make_part("aggregation", "token_mean"))
    algorithm = Algorithm("mine", (stream,), credit=make_part("credit", "mean_only"))
    with pytest.raises(AlgorithmError, match=r"for no objective.*objectives\.py:bare.*advantage=True"):
        check(algorithm)


def test_traits_are_checked():
    for traits, match in (
        ({"level": "rollout"}, "level 'rollout'.*'token', 'unit'"),
        ({"level": "unit", "unit": "turn"}, "unit 'turn'.*'row', 'rollout', 'group'"),
        ({"unit": "rollout"}, "unit 'rollout'.*level 'unit'"),
        ({"group_min": 0}, "group_min 0"),
    ):
        register_objective("test_traits", **traits)(reinforce)
        with pytest.raises(AlgorithmError, match=f"objective 'test_traits': {match}"):
            make_part("objective", "test_traits")


@register_algorithm("test_refuses")
def refuses(*, exponent: float = 2.0) -> Algorithm:
    raise ValueError(f"exponent {exponent} is odd")


def test_a_builder_may_refuse_its_options():
    with pytest.raises(AlgorithmError, match=r"algorithm 'test_refuses': exponent 3\.0 is odd"):
        resolve({"kind": "test_refuses", "exponent": 3})


def test_names_are_given_once():
    with pytest.raises(AlgorithmError, match="credit 'mean_only' is already"):
        register_credit("mean_only")(Half)
    with pytest.raises(AlgorithmError, match="unknown trait"):
        register_credit("test_other", advantage=True)
    register_credit("test_gold", needs={"gold"})(power)
    with pytest.raises(AlgorithmError, match=r"needs \['gold'\]"):
        make_part("credit", "test_gold")


def test_credit_must_fit_the_objective():
    from dataclasses import replace

    grpo = resolve("grpo")
    with pytest.raises(AlgorithmError, match="needs an advantage"):
        check(replace(grpo, credit=None))
    with pytest.raises(AlgorithmError, match="for no objective"):
        check(replace(resolve("sft"), credit=grpo.credit))
    with pytest.raises(AlgorithmError, match="set proximal"):
        check(replace(grpo, proximal=None))
    with pytest.raises(AlgorithmError, match="no stream"):
        check(replace(grpo, streams=()))
    with pytest.raises(AlgorithmError, match="must differ"):
        check(replace(grpo, streams=grpo.streams * 2))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"kind": "grpo", "kl_weight": float("nan")}, "option kl_weight=nan"),
        ({"kind": "grpo", "kl_weight": float("inf")}, "option kl_weight=inf"),
        ({"kind": "grpo", "entropy_weight": float("-inf")}, "option entropy_weight=-inf"),
        ({"kind": "asymre", "shift": float("nan")}, "option shift=nan"),
        ({"kind": "gmpo", "clip": [float("nan"), 0.4]}, "option clip"),
        ({"kind": "grpo", "credit": {"kind": "reinforce", "baseline": float("nan")}}, "option baseline=nan"),
        ({"kind": "grpo", "masks": [{"kind": "reward", "above": float("nan")}]}, "option above=nan"),
        ({"kind": "grpo", "shaping": [{"kind": "quality_bonus", "weight": float("nan")}]}, "weight=nan"),
        ({"kind": "dpo", "beta": float("inf")}, "option beta=inf"),
    ],
)
def test_numbers_are_finite(spec, match):
    with pytest.raises(AlgorithmError, match=match):
        resolve(spec)


def test_bounds_may_be_open():
    assert resolve({"kind": "grpo", "tis": [0.5, float("inf")], "clip": [0.2, float("inf")]})


def test_a_scale_is_finite():
    stream = resolve("grpo").streams[0]
    with pytest.raises(AlgorithmError, match="scale"):
        check(
            Algorithm(
                "mine",
                (replace(stream, scale=float("nan")),),
                credit=make_part("credit", "mean_only"),
                proximal="recompute",
            )
        )


@pytest.mark.parametrize("kind", ["policy_gradient", "grpo", "dapo", "mix"])
def test_options_alone_go_to_the_frames_own_part(kind):
    """As the reference says: options without a kind keep the algorithm's choice, the frame's among them."""
    algorithm = resolve({"kind": kind, "credit": {"std": "population"}})
    assert (algorithm.credit.name, algorithm.credit.options) == ("group_normalised", {"std": "population"})
    dual = resolve({"kind": kind, "objective": {"dual": 3.0}}).streams[0].objective
    assert (dual.name, dual.options["dual"]) == ("ppo_clip", 3.0)


def test_kto_needs_its_own_credit():
    with pytest.raises(AlgorithmError, match=r"reads the credit's column 'reference_kl'.*kto_reference"):
        resolve({"kind": "grpo", "objective": "kto"})


@pytest.mark.parametrize("value", ["bradley_terry", "ppo_clip"])
def test_a_critic_learns_returns(value):
    with pytest.raises(AlgorithmError, match=f"value: {value!r} .*return"):
        resolve({"kind": "ppo", "value": value})


def test_a_part_of_another_role_is_refused():
    place = "trivet.algorithms.objectives.policy:PPOClip"
    with pytest.raises(AlgorithmError, match="is an objective, not a credit"):
        resolve({"kind": "grpo", "credit": place})


def test_a_refusal_names_its_stage():
    stages = [
        {"name": "a", "steps": 3, "algorithm": "grpo"},
        {"name": "b", "steps": 3, "algorithm": {"kind": "grpo", "clip": -1}},
    ]
    with pytest.raises(AlgorithmError, match=r"stages\.b: objective 'ppo_clip'"):
        resolve_all(Recipe.model_validate({"stages": stages}))
    stages[1] |= {"algorithm": "grpo", "phases": [{"from": 2, "set": {"algorithm.clip": -1}}]}
    with pytest.raises(AlgorithmError, match=r"stages\.b@2: objective 'ppo_clip'"):
        resolve_all(Recipe.model_validate({"stages": stages}))
