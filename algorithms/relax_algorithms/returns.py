"""Returns and generalised advantages of a trajectory, token by token.

Pure functions on numpy, without torch. They run over the *sampled* tokens of a trajectory in order, over all of its
rows: the successor of a token is the next sampled one. Observations between turns are not there, and so take no reward,
no KL and no discount. ``credit.sampled`` takes such numbers out of the rows, ``credit.placed`` puts them back.

Legend: N sampled tokens of a trajectory. Everything is float64 (N,); N may be 0.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from relax_algorithms import credit

if TYPE_CHECKING:
    from relax_algorithms.credit import Values
    from relax_algorithms.options import Kl
    from relax_core.interfaces import Member


def token_rewards(member: Member, end: float, kl: Kl | None) -> Values:
    """The reward of each token: ``end`` on the last one, and -coefficient x k1 on every one if ``kl`` is a reward.

    k1 = log mu - log ref of the token, where mu is the policy that sampled it.
    """
    import numpy as np

    logprobs = credit.sampled(member, "logprobs")
    if kl is None or kl.place == "loss":
        rewards = np.zeros(len(logprobs))
    else:
        rewards = -kl.coefficient * (logprobs - credit.sampled(member, "ref_logprobs"))
    rewards[-1:] += end
    return rewards


def discounted(values: Values, factor: float) -> Values:
    """x_t = values_t + factor x_{t+1}, and 0 after the last token: of rewards, their discounted returns."""
    import numpy as np

    sums = accumulate(values[::-1].tolist(), lambda later, now: now + factor * later)
    return np.array(list(sums), np.float64)[::-1]


def gae(rewards: Values, values: Values, gamma: float, lam: float) -> Values:
    """Generalised advantage estimates (arXiv:1506.02438): A_t = delta_t + gamma lam A_{t+1}.

    delta_t = r_t + gamma V_{t+1} - V_t, with the value 0 after the last token: there the trajectory has ended, for
    whatever reason. Raises ValueError unless both have a number for each token.
    """
    import numpy as np

    if rewards.shape != values.shape:
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values: give one of each for every token")
    following = np.append(values[1:], 0.0)[: len(values)]
    return discounted(rewards + gamma * following - values, gamma * lam)
