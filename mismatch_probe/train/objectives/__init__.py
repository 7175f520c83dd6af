"""Objectives: an advantage, a ratio with its clip, and a correction, chosen independently, under one normaliser.

    objective = catalogue.build_objective("grpo-seq-mis", {"threshold": 2.0})
    batch = RolloutBatch(rewards_N, group_ids_N, lengths_N, included_N, old_logprobs_T, mu_logprobs_T, values_T)
    plan = losses.plan_loss(objective, batch, max_new_tokens)  # advantages, weights, what is kept; no gradient
    update = plan.update(rows)  # the responses of one optimizer step (all by default): fixes the denominators
    result = losses.policy_loss(update, logprobs_t, rows)  # some of those responses, with gradient
    value = values.value_loss(update, values_t, rows)  # where objective.critic is not None

A batch is one sampling round; its tokens are flat [T], response after response, and so are those of a micro-batch, in
the order of its `rows`. Losses of micro-batches (and of ranks that prepared the same batch) add up to the loss of the
update: sum gradients, never average them. Dropping responses is another `included_N`, switching the correction another
objective; prepare again, it costs no forward pass. A reward or log-prob that is not finite and that a kept token's loss
is made of leaves no finite loss: nothing is replaced. Ratios and weights are held within e^-20 and e^20. `choices` and
`catalogue` know no torch.
"""
