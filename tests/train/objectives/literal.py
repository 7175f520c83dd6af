"""The objectives written out with loops over Python numbers, as their papers print them."""

import math
import statistics

from mismatch_probe.train.objectives.advantages import RolloutBatch
from mismatch_probe.train.objectives.catalogue import Objective

PerToken = list[list[float]]


def by_response(batch: RolloutBatch, values_t: list[float]) -> PerToken:
    rows, start = [], 0
    for length in batch.lengths_N.tolist():
        rows.append(values_t[start : start + length])
        start += length
    return rows


def literal_advantages(rule: str, rewards: list[float], groups: list[int]) -> list[float]:
    found = []
    for row, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mates = [other for other, of in zip(rewards, groups, strict=True) if of == group]
        others = [rewards[place] for place, of in enumerate(groups) if of == group and place != row]
        match rule:
            case "reward":
                found.append(reward)
            case "batch-mean":
                found.append(reward - sum(rewards) / len(rewards))
            case "group-mean":
                found.append(reward - sum(mates) / len(mates))
            case "leave-one-out":
                found.append(reward - sum(others) / len(others))
            case "group-mean-std":
                found.append((reward - sum(mates) / len(mates)) / (statistics.stdev(mates) + 1e-6))
    return found


def literal_gae(reward: float, values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """A_t as the double sum: sum over l of (discount lambda)^l delta_{t+l}."""
    length = len(values)
    rewards = [0.0] * (length - 1) + [reward]
    next_values = [*values[1:], 0.0]
    deltas = [rewards[t] + discount * next_values[t] - values[t] for t in range(length)]
    return [
        sum((discount * gae_lambda) ** (later - now) * deltas[later] for later in range(now, length))
        for now in range(length)
    ]


def literal_token_advantages(objective: Objective, batch: RolloutBatch) -> PerToken:
    rewards, included = batch.rewards_N.tolist(), batch.included_N.tolist()
    if objective.critic is None:
        found = literal_advantages(objective.advantage, rewards, batch.group_ids_N.tolist())
        return [[advantage] * length for advantage, length in zip(found, batch.lengths_N.tolist(), strict=True)]
    assert batch.values_T is not None
    rows = [
        literal_gae(reward, values, objective.critic.discount, objective.critic.gae_lambda)
        for reward, values in zip(rewards, by_response(batch, batch.values_T.tolist()), strict=True)
    ]
    tokens = [value for row, is_in in zip(rows, included, strict=True) if is_in for value in row]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in rows]


def literal_weights(objective: Objective, batch: RolloutBatch) -> list[list[float | None]]:
    """Weight of each token, None where it is out of the loss."""
    rule = objective.correction
    old, mu = (by_response(batch, values.tolist()) for values in (batch.old_logprobs_T, batch.mu_logprobs_T))
    found: list[list[float | None]] = []
    for old_row, mu_row, is_in in zip(old, mu, batch.included_N.tolist(), strict=True):
        ratios = [math.exp(o) / math.exp(m) for o, m in zip(old_row, mu_row, strict=True)]
        if rule.level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        row: list[float | None] = []
        for ratio in ratios:
            match rule.action:
                case "none":
                    row.append(1.0)
                case "weigh":
                    row.append(ratio)
                case "truncate":
                    row.append(min(ratio, rule.threshold))
                case "mask":
                    row.append(ratio if rule.floor <= ratio <= rule.threshold else None)
        found.append(row if is_in else [None] * len(row))
    return found


def literal_loss(objective: Objective, batch: RolloutBatch, logprobs_t: list[float], max_new_tokens: int) -> float:
    advantages, weights = literal_token_advantages(objective, batch), literal_weights(objective, batch)
    old, new = by_response(batch, batch.old_logprobs_T.tolist()), by_response(batch, logprobs_t)
    responses: list[list[float]] = []
    for row in range(len(old)):
        terms = []
        for token in range(len(old[row])):
            weight, advantage = weights[row][token], advantages[row][token]
            if weight is None:
                continue
            if objective.ratio.level == "none":
                terms.append(-weight * advantage * new[row][token])
                continue
            ratio = math.exp(new[row][token]) / math.exp(old[row][token])
            if objective.ratio.level == "sequence":
                ratio = (math.exp(sum(new[row])) / math.exp(sum(old[row]))) ** (1 / len(old[row]))
            clipped = min(max(ratio, 1 - objective.ratio.clip_low), 1 + objective.ratio.clip_high)
            surrogate = min(ratio * advantage, clipped * advantage)
            if objective.ratio.dual_clip is not None and advantage < 0:
                surrogate = max(surrogate, objective.ratio.dual_clip * advantage)
            terms.append(-weight * surrogate)
        if terms:
            responses.append(terms)
    match objective.normaliser:
        case "token":
            return sum(map(sum, responses)) / sum(map(len, responses))
        case "sequence":
            return sum(sum(terms) / len(terms) for terms in responses) / len(responses)
        case _:
            return sum(map(sum, responses)) / (len(responses) * max_new_tokens)
