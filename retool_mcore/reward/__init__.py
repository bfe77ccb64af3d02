"""Judges mathematical answers, without torch or a model. README.md has an example.

- ``extract_answer`` finds the answer in a response: the last ``\\boxed{}`` that the model wrote.
- ``judge`` compares an answer with a truth, within limits of CPU time and memory.
- ``judge_many`` compares many pairs in several processes.
- ``truth_problem`` returns why the judge cannot use a truth, or None if it can.

No answer raises an error. A ``RewardError`` means that the machine failed.
"""

from retool_mcore.errors import RewardError
from retool_mcore.reward.answer import Verdict, judge, judge_many, truth_problem
from retool_mcore.reward.extract import extract_answer

__all__ = ["RewardError", "Verdict", "extract_answer", "judge", "judge_many", "truth_problem"]
