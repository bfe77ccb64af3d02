"""The judge of answers, which needs neither torch nor a model. README.md has an example.

- ``extract_answer`` finds the answer in a whole response: the last box in the model's own words.
- ``judge`` says whether an answer equals a truth, within a limit of CPU time and memory.
- ``judge_many`` does so for many pairs, in several processes.
- ``judgeable`` says why no answer can be judged against a truth; None where one can.

What an answer says is never an error; what is wrong with the machine is a ``RewardError``.
"""

from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import Verdict, judge, judge_many, judgeable
from retool_mcore.reward.extract import extract_answer

__all__ = ["RewardError", "Verdict", "extract_answer", "judge", "judge_many", "judgeable"]
