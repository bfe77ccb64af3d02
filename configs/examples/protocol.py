"""A custom protocol: rollout.protocol = "configs.examples.protocol:Instructed".

It uses Qwen's call format and adds an instruction before the problem.
"""

from collections.abc import Sequence

from retool_mcore.rollout.protocol import Hermes, Message

INSTRUCTION = "Solve the problem. Check every step that you can check by running code."


class Instructed(Hermes):
    name = "instructed"

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        *before, problem = messages
        return super().prompt_ids([*before, {**problem, "content": f"{INSTRUCTION}\n\n{problem['content']}"}])
