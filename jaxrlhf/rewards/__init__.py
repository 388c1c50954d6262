"""Rewards: rule-based, user-written and model-based scores of responses, behind one small protocol.

Worker processes and users' reward files import this package, so it loads nothing heavy.
"""

from jaxrlhf.rewards.protocol import Failure, RewardsFailing, batched
