"""Ratios, and times of day, which are written like them."""

from math import gcd

from retool_mcore.reward.node import Term
from retool_mcore.reward.points import names


def ratio_behind_names(node: Term) -> Term:
    """``AB:BC = 3:2`` as ``3:2``."""
    signs = node.text.split()
    if signs[:1] == ["="] and set(signs[1:]) == {":"} and node.args[0].op == "name":
        return Term("relation", node.args[1:], " ".join(signs[1:]))  # ratio = 3:2
    half = len(signs) // 2
    if len(signs) < 3 or signs != [":"] * half + ["="] + [":"] * half:
        return node
    left, right = node.args[: half + 1], node.args[half + 1 :]
    named = all(map(names, left)) and not any(map(names, right))
    return Term("relation", right, " ".join(signs[half + 1 :])) if named else node


def is_clock(node: Term) -> bool:
    """Whether a part of a ratio is 0 or begins with 0: ``9:00`` and ``9:05`` are times of day."""
    texts = [each.text for each in node.args if each.op == "number"]
    return any(text.isdigit() and (text.startswith("0") or not int(text)) for text in texts)


def is_time(node: Term) -> bool:
    """Whether a truth is a time of day, ``2:30``: a ratio of truth has its lowest terms."""
    texts = [each.text for each in node.args if each.op == "number"]
    if len(texts) != 2 or len(node.args) != 2 or not all(map(str.isdigit, texts)) or len(texts[1]) != 2:
        return False
    return int(texts[0]) < 24 and int(texts[1]) < 60 and gcd(int(texts[0]), int(texts[1])) > 1
