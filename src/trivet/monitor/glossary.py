"""Every metric a run logs: its name, its unit, what it is. The page of metrics is made from this table.

Names read namespace/meaning. In angle brackets stands what differs from run to run: <stream> a term of the
loss, <cause>, <part>, <taskset> ...; the last one of a name may hold further slashes. Parts, environments and
engines of one's own may log names that are not here: `describe` knows nothing of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


class Metric(NamedTuple):
    """`unit`: share (0 to 1), tokens, nats, seconds ...; "" for a plain number or what the name says."""

    name: str
    unit: str
    about: str


class Section(NamedTuple):
    """The metrics of one namespace, and what is to be said of all of them."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


_M = Metric

_REWARD = Section(
    "reward/",
    "Over the step's own attempts; greedy ones that are only compared with are left out.",
    (
        _M("reward/mean", "reward", "mean reward of the scored rollouts of the step"),
        _M("reward/std", "reward", "their standard deviation"),
        _M("reward/solved", "share", "scored rollouts that count as solved: a reward of at least 0.9"),
        _M("reward/unscored", "share", "rollouts without a score; never counted as 0"),
        _M("reward/unscored/<cause>", "share", "the same for one cause; absent when none"),
        _M("reward/part/<part>", "reward", "mean of one part of the reward (`reward/part/correct` ...)"),
    ),
)
_GROUP = Section(
    "group/",
    "Shares of the groups that were played, whether accepted or not; the first three of those with a score.",
    (
        _M("group/all_solved", "share", "every rollout is solved"),
        _M("group/none_solved", "share", "none is solved"),
        _M("group/all_equal", "share", "all rewards are equal: the group teaches nothing"),
        _M("group/filtered", "share", "dropped by `explorer.window`, or because nothing had a score"),
    ),
)
_ROLLOUT = Section(
    "rollout/",
    "",
    (
        _M("rollout/count", "rollouts", "rollouts of the step"),
        _M("rollout/tokens", "tokens", "what they sampled"),
        _M("rollout/length_mean", "tokens", "sampled tokens a rollout, mean"),
        _M("rollout/length_p50", "tokens", "median"),
        _M("rollout/length_p90", "tokens", "90th percentile"),
        _M("rollout/length_max", "tokens", "longest"),
        _M("rollout/truncated", "share", "cut off by a budget: length, context, turns, tool calls, deadline"),
        _M("rollout/ended/<termination>", "share", "ended so (`finished`, `length` ...)"),
        _M("rollout/tokens_per_solve", "tokens", "sampled for one solved rollout; absent where none is"),
    ),
)
_CONDUCT = Section(
    "conduct/",
    "How the step's rollouts were played. A winner has a reward of at least 0.9, a loser of at most 0.05; "
    "turns are the policy's own. Tool calls are what an environment counts as `tool_calls` and "
    "`malformed_calls`; without tools there are none of their metrics.",
    (
        _M("conduct/winners/turns_p50", "turns", "turns of winners, median"),
        _M("conduct/winners/turns_p90", "turns", "90th percentile"),
        _M("conduct/losers/turns_p50", "turns", "turns of losers, median"),
        _M("conduct/losers/turns_p90", "turns", "90th percentile"),
        _M("conduct/winners/tool_calls_p50", "calls", "tool calls of winners, median"),
        _M("conduct/winners/tool_calls_p90", "calls", "90th percentile"),
        _M("conduct/losers/tool_calls_p50", "calls", "tool calls of losers, median"),
        _M("conduct/losers/tool_calls_p90", "calls", "90th percentile"),
        _M("conduct/tool_calls", "calls", "mean tool calls a rollout"),
        _M("conduct/malformed_calls", "share", "calls that could not be read"),
        _M("conduct/answer_characters", "characters", "mean length of the final answer, without reasoning"),
        _M("conduct/reasoning_characters", "characters", "mean length of the reasoning before it"),
    ),
)
_EXPLORER = Section(
    "explorer/",
    "",
    (
        _M("explorer/accepted", "groups", "groups that are trained"),
        _M("explorer/filtered", "groups", "groups that were played and are not trained, for any cause"),
        _M(
            "explorer/filtered/<cause>",
            "groups",
            "the same for one cause; `surplus`: a full batch had no room",
        ),
        _M("explorer/failed", "groups", "groups that infrastructure lost"),
        _M("explorer/lost", "share", "the same, of all groups that were asked for"),
        _M("explorer/retried", "rollouts", "played again after infrastructure failed"),
        _M("explorer/rounds", "rounds", "rounds of sampling, the first included"),
    ),
)
_TRAIN = Section(
    "train/",
    "Where a step makes several updates (`batch.updates_per_batch`), its numbers are those of all of them: "
    "counts (tokens, micro-batches) and times are sums, maxima the largest, `lr`, `updates` and "
    "`bad_updates` as they are after the last, and everything else is the mean. An update with nothing to "
    "train on enters none of them.",
    (
        _M("train/loss", "", "the objective, as minimised"),
        _M("train/entropy", "nats", "mean entropy of the policy at trained positions"),
        _M("train/kl", "nats a token", "estimate (k3) of KL(sampling policy, current policy)"),
        _M(
            "train/ref_kl",
            "nats a token",
            "estimate (k3) of KL(sampling policy, reference), where there is one",
        ),
        _M("train/gap", "nats a token", "mean difference of log-probabilities to the sampler, without sign"),
        _M("train/ess", "share", "effective sample size under the weights current over sampling policy"),
        _M("train/clipped", "share", "trained tokens (or units) at which the objective's clip took effect"),
        _M("train/grad_norm", "", "norm of the gradient before clipping"),
        _M("train/lr", "", "learning rate"),
        _M("train/accuracy", "share", "where an objective counts what it calls so: pairs in the right order"),
        _M("train/margin", "", "likewise: distance between chosen and rejected"),
        _M("train/prompts", "groups", "groups (RL) or examples (SFT) trained"),
        _M("train/packs", "packs", "packs trained, of packed data"),
        _M("train/epoch", "passes", "how often packed data have been gone through so far"),
        _M(
            "train/loss/source/<name>",
            "nats a token",
            "mean negative log-likelihood of one source's trained tokens, by their weight in the loss",
        ),
        _M("train/loss/category/<name>", "nats a token", "the same of one category of packed data"),
        _M("train/tokens_trained", "tokens", "with a loss"),
        _M("train/tokens_forwarded", "tokens", "computed"),
        _M("train/tokens_shared", "tokens", "not computed because rows share them"),
        _M("train/tokens_per_s", "tokens a second", "forward, backward and optimiser"),
        _M("train/micro_batches", "", "forward passes of the step"),
        _M("train/updates", "", "optimiser updates so far"),
        _M("train/bad_updates", "", "updates in a row whose loss or gradient was not finite"),
        _M("train/skipped", "", "1 where none of the step's updates had anything to train on; else absent"),
        _M("train/annotate_s", "seconds", "log-probabilities of other policies"),
    ),
)
_BATCH = Section(
    "train/: the batch",
    "Counted once a step, before the first update.",
    (
        _M("train/groups", "groups", "groups of the batch"),
        _M(
            "train/groups_zero_advantage", "groups", "in which no trained token has an advantage other than 0"
        ),
        _M("train/zero_advantage_share", "share", "the same, of all groups of the batch"),
        _M("train/rollouts", "rollouts", "rollouts of the batch"),
        _M("train/rollouts_unscored", "rollouts", "without a score"),
        _M("train/rollouts_aborted", "rollouts", "aborted by infrastructure; they leave before any mean"),
        _M("train/rollouts_baseline", "rollouts", "only compared with, never trained"),
        _M("train/truncated_share", "share", "rollouts that were cut off"),
        _M("train/rows", "rows", "rows of the batch"),
        _M("train/rows_active", "rows", "rows with a trained token"),
        _M("train/tokens", "tokens", "tokens of the batch, prompts too"),
        _M("train/active_tokens", "tokens", "at which a loss of the policy is computed"),
        _M("train/trained_tokens", "tokens", "that have a weight: they stand in a denominator"),
        _M("train/trained_share", "share", "the same, of the tokens that could be trained before any mask"),
        _M("train/staleness_mean", "publications", "age of the trained tokens' turns"),
        _M("train/staleness_max", "publications", "of the oldest"),
        _M(
            "train/masked_tokens/<cause>",
            "tokens",
            "that a mask took, by its name, or that have no advantage",
        ),
        _M("train/masked_rollouts/<cause>", "rollouts", "that lost their last token so"),
        _M("train/shaped/<part>", "reward", "what a shaping part changed on average"),
    ),
)
_STREAM = Section(
    "train/: streams",
    "A stream is a term of the loss: `pg` the policy's own in algorithms with rewards, `kl` the distance to "
    "the reference, `entropy` the bonus, `value` the critic's, `sft` imitation. Means per token; per unit "
    "(an answer, a pair) where the objective looks at whole units.",
    (
        _M("train/<stream>/loss", "", "what it adds to the loss"),
        _M("train/<stream>/tokens", "tokens", "tokens it saw"),
        _M("train/<stream>/units", "units", "units it saw"),
        _M("train/<stream>/scale", "", "where a control has moved its scale to"),
        _M("train/<stream>/entropy", "nats", "as `train/entropy`, over the stream's tokens"),
        _M("train/<stream>/ratio", "", "mean ratio to the policy the update started from"),
        _M("train/<stream>/clipped", "share", "where the clip took effect"),
        _M("train/<stream>/dual_clipped", "share", "where the dual clip did"),
        _M("train/<stream>/abs_log_diff", "nats", "mean difference to the sampler, without sign"),
        _M("train/<stream>/abs_log_diff_max", "nats", "the largest"),
        _M("train/<stream>/kl_k1", "nats", "KL(sampler, current policy), estimate k1"),
        _M("train/<stream>/kl_k3", "nats", "estimate k3"),
        _M("train/<stream>/gap/<age>", "nats", "as `abs_log_diff`, for turns of one age in publications"),
        _M("train/<stream>/aged/<age>", "tokens", "tokens of that age (0, 1, 2, 3_4, 5_up)"),
        _M("train/<stream>/sampler_ratio", "", "mean ratio of the current to the sampling policy"),
        _M(
            "train/<stream>/ess/<factor>",
            "share",
            "effective sample size of a factor, (sum f)^2 / (n sum f^2)",
        ),
        _M("train/<stream>/tis_factor", "", "mean truncated weight of a token"),
        _M("train/<stream>/tis_clipped", "share", "tokens whose weight was truncated"),
        _M("train/<stream>/icepop_factor", "", "mean weight of a token, 0 for the masked"),
        _M("train/<stream>/icepop_masked", "share", "tokens left out"),
        _M("train/<stream>/sequence_factor", "", "mean truncated weight of an answer"),
        _M("train/<stream>/sequence_clipped", "share", "answers whose weight was truncated"),
        _M("train/<stream>/mis_factor", "", "mean weight of an answer, 0 for the masked"),
        _M("train/<stream>/mis_masked", "share", "answers left out"),
        _M("train/<stream>/mis_vetoed", "share", "answers left out for one token"),
        _M("train/<stream>/geometric_ratio", "", "mean over answers of the geometric mean of ratios"),
        _M("train/<stream>/geometric_kept", "share", "answers that stay"),
        _M("train/<stream>/geometric_masked", "share", "answers left out"),
        _M("train/<stream>/geometric_vetoed", "share", "answers left out for one token"),
        _M("train/<stream>/top_mass", "share", "probability of the sampler's stored top entries"),
        _M("train/<stream>/uncentred", "share", "tokens without top entries, whose score is not centred"),
        _M("train/<stream>/score_bias", "", "mean sum of q log-probability taken off a token's score"),
        _M("train/<stream>/divergence", "nats", "DPPO: distance the mask is decided by"),
        _M("train/<stream>/gate", "", "SAPO: mean opening of the gate"),
        _M("train/<stream>/taper", "", "TOPR: mean factor of a token"),
        _M("train/<stream>/tapered", "share", "TOPR: answers whose factor is not 1"),
        _M("train/<stream>/k1", "nats", "distance to the other policy, estimate k1"),
        _M("train/<stream>/k3", "nats", "estimate k3"),
        _M("train/<stream>/nll", "nats", "negative log-likelihood"),
        _M("train/<stream>/phi", "", "CHORD: mean weight of an expert's token"),
        _M("train/<stream>/value", "reward", "mean estimate of the critic"),
        _M("train/<stream>/return", "reward", "mean return it is to learn"),
        _M("train/<stream>/squared_error", "", "mean square of their difference"),
        _M("train/<stream>/accuracy", "share", "pairs in the right order"),
        _M("train/<stream>/margin", "", "mean distance between chosen and rejected"),
        _M("train/<stream>/chosen", "", "mean reward or log-ratio of chosen answers"),
        _M("train/<stream>/rejected", "", "of rejected ones"),
        _M("train/<stream>/pair_loss", "", "mean loss of a pair"),
        _M("train/<stream>/odds_loss", "", "ORPO: its part by odds"),
        _M("train/<stream>/reward", "", "KTO: mean implicit reward"),
        _M("train/<stream>/desirable", "share", "KTO: desirable answers"),
        _M("train/<stream>/desirable_reward", "", "KTO: their mean implicit reward"),
        _M("train/<stream>/reference_kl", "nats", "KTO: its reference point"),
        _M("train/<stream>/unpaired", "", "rows that had no other side"),
    ),
)
_CRITIC = Section(
    "train/critic/",
    "The same as without `critic/`, of the critic's own optimiser.",
    (
        _M("train/critic/loss", "", "loss of the critic"),
        _M("train/critic/grad_norm", "", "norm of its gradient before clipping"),
        _M("train/critic/lr", "", "its learning rate"),
        _M("train/critic/updates", "", "its updates so far"),
        _M("train/critic/bad_updates", "", "its bad updates in a row"),
        _M("train/critic/explained_variance", "", "1 - var(return - value) / var return, before the update"),
    ),
)
_ENGINE = Section(
    "engine/",
    "The engine's own counts since the last step: [engine](engine.md#metrics).",
    (
        _M("engine/tokens_per_s", "tokens a second", "sampled, over the whole of sampling"),
        _M("engine/<name>", "", "one of the engine's own counts"),
    ),
)
_BUFFER = Section(
    "buffer/",
    "",
    (
        _M("buffer/lag", "steps", "between the weights that sampled and the step that trains"),
        _M("buffer/replayed", "", "1 where a step was trained on rollouts stored before a restart"),
    ),
)
_SYNC = Section(
    "sync/",
    "",
    (
        _M("sync/version", "", "version of the weights that were published after the step"),
        _M("sync/probe_gap", "nats", "largest difference between engine and trainer on the probe prompt"),
    ),
)
_EVAL = Section(
    "eval/&lt;taskset&gt;/",
    "A taskset's name has no slash. In a bench stage the names are `<taskset>@<model>`, and `step` is the "
    "model's place.",
    (
        _M("eval/<taskset>/pass@<k>", "share", "estimate of the chance that one of k rollouts passes"),
        _M("eval/<taskset>/pass@<k>/low", "share", "lower bound of its interval"),
        _M("eval/<taskset>/pass@<k>/high", "share", "upper bound"),
        _M(
            "eval/<taskset>/pass@<k>/short",
            "tasks",
            "left out of it for want of k scored rollouts; or absent",
        ),
        _M("eval/<taskset>/reward", "reward", "mean reward of the scored rollouts"),
        _M("eval/<taskset>/length", "tokens", "mean sampled tokens"),
        _M("eval/<taskset>/truncated", "share", "as above"),
        _M("eval/<taskset>/unscored", "share", "as above"),
        _M("eval/<taskset>/unscored/<cause>", "share", "as above"),
        _M("eval/<taskset>/tasks", "tasks", "tasks played"),
        _M(
            "eval/<taskset>/loss",
            "nats a token",
            "of held-out data (`held_out`): mean negative log-likelihood of trained tokens, by loss weight",
        ),
        _M("eval/<taskset>/loss/source/<name>", "nats a token", "the same of one source"),
        _M("eval/<taskset>/loss/category/<name>", "nats a token", "the same of one category"),
        _M("eval/<taskset>/tokens", "tokens", "trained tokens it is the mean of"),
    ),
)
_TIME = Section(
    "time/",
    "Parts that overlap may add up to more than the step.",
    (
        _M("time/step_s", "seconds", "a step, without the evaluation and the checkpoint after it"),
        _M("time/sample_s", "seconds", "sampling"),
        _M("time/train_s", "seconds", "training"),
        _M("time/sync_s", "seconds", "bringing the weights to the engine"),
        _M("time/train_<part>_s", "seconds", "parts of training: `plan`, `forward`, `backward`, `optim`"),
        _M("time/critic/train_<part>_s", "seconds", "the same of the critic"),
    ),
)
SECTIONS: tuple[Section, ...] = (
    *(_REWARD, _GROUP, _ROLLOUT, _CONDUCT, _EXPLORER, _TRAIN, _BATCH, _STREAM, _CRITIC),
    *(_ENGINE, _BUFFER, _SYNC, _EVAL, _TIME),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for section in SECTIONS for metric in section.metrics}
"""All of them by name, brackets and all."""


def _pattern(name: str) -> re.Pattern[str]:
    """<cause> at the end stands for anything, elsewhere for what has no slash."""
    pieces = re.split(r"(<[a-z]+>)", name)
    words = [r"[^/]+" if piece.startswith("<") else re.escape(piece) for piece in pieces]
    if name.endswith(">") and not name.endswith("@<k>"):
        words[-2] = r".+"
    return re.compile("".join(words))


_PATTERNS = [(_pattern(metric.name), metric) for metric in METRICS.values() if "<" in metric.name]


@lru_cache(maxsize=4096)
def describe(name: str) -> Metric | None:
    """The entry of a logged name; None for one that is not the project's own."""
    if name in METRICS and "<" not in name:
        return METRICS[name]
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def reference() -> str:
    """One table for each namespace, in Markdown."""
    blocks = []
    for section in SECTIONS:
        rows = [f"| `{m.name}` | {m.unit} | {m.about} |" for m in section.metrics]
        table = "\n".join(["| key | unit | what it is |", "|---|---|---|", *rows])
        blocks += [f"## {section.title}", *([section.about] if section.about else []), table]
    return "\n\n".join(blocks)
