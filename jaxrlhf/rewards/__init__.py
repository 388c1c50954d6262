"""Text to score: rule-based, user-written and model-based rewards behind one small protocol.

Worker processes and users' reward files import this room, so it loads nothing heavy.
"""

from jaxrlhf.rewards.protocol import Failure, RewardsFailing, batched
