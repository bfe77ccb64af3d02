r"""Spellings by rule: each family draws a value and writes it in all the ways that it may have.

``pairs`` gives ways of one value (equal) and of two values (unequal), for the property tests.
"""

import random
from collections.abc import Callable, Hashable, Iterator
from fractions import Fraction

Draw = random.Random
# A family draws a value and the ways to write it; two draws with one value have no unequal ways.
Family = Callable[[Draw], tuple[Hashable, list[str]]]


def scientific(draw: Draw) -> tuple[Hashable, list[str]]:
    digits, power = draw.randint(10, 99999), draw.randint(-40, 40)
    text = str(digits)
    point, shifted = f"{text[0]}.{text[1:]}", power + len(text) - 1
    ways = [rf"{point}{sign}10^{{{shifted}}}" for sign in (r" \times ", r"\cdot", r" \times", "*")]
    ways += [f"{point}e{shifted}", f"{point}E{shifted:+d}", rf"{digits} \times 10^{{{power}}}", f"{digits}e{power}"]
    ways += [rf"{point}\times10^{{{shifted}}}\text{{ J}}", f"{point} × 10^{shifted}"]
    return Fraction(digits) * Fraction(10) ** power, ways


def grouped(draw: Draw) -> tuple[Hashable, list[str]]:
    value = draw.randint(1000, 10**11)
    comma = f"{value:,}"
    return value, [
        str(value),
        comma,
        comma.replace(",", "{,}"),
        comma.replace(",", r",\!"),
        comma.replace(",", r",\! "),
        comma.replace(",", r"\,"),
        rf"\${comma}",
        rf"{comma}\text{{ people}}",
        f"{comma}.",
        f"x={comma}",
        rf"\text{{{comma}}}",
    ]


def fraction(draw: Draw) -> tuple[Hashable, list[str]]:
    value = Fraction(draw.randint(1, 60), draw.choice((2, 4, 5, 8, 10, 20, 25)))
    over, under = value.numerator, value.denominator
    ways = [
        rf"\frac{{{over}}}{{{under}}}",
        rf"\dfrac{{{over}}}{{{under}}}",
        f"{over}/{under}",
        rf"\left(\frac{{{over}}}{{{under}}}\right)",
        rf"{over}\left(\frac{{1}}{{{under}}}\right)",
        rf"\frac{{{3 * over}}}{{{3 * under}}}",
        str(float(value)),
        rf"\frac{{-{over}}}{{-{under}}}",
        rf"{over} \div {under}",
    ]
    hundredths = value * 100
    if hundredths.denominator == 1:
        ways += [f"{hundredths}{sign}" for sign in ("%", r"\%", r" \%", " percent", " pct", r"\text{ percent}", r"\%.")]
    if over > under > 1:
        whole, rest = divmod(over, under)
        ways += [rf"{whole}\frac{{{rest}}}{{{under}}}", f"{whole} {rest}/{under}"]
    return value, ways


def product(draw: Draw) -> tuple[Hashable, list[str]]:
    count, letters = draw.randint(2, 9), draw.sample("abcmnrsxyz", draw.randint(2, 3))
    squared = draw.choice(letters)
    parts = [str(count), *(f"{letter}^2" if letter == squared else letter for letter in letters), r"\pi"]
    ways = ["".join(parts[:-1]) + r"\pi", " ".join(parts), r" \cdot ".join(parts), "*".join(parts)]
    for _ in range(3):
        tail = draw.sample(parts[1:], len(parts) - 1)
        ways += [" ".join([parts[0], *tail]), r" \cdot ".join(draw.sample(parts, len(parts)))]
    ways.append(rf"\frac{{{2 * count} {' '.join(parts[1:])}}}{{2}}")
    return (count, frozenset(letters), squared), ways


def interval(draw: Draw) -> tuple[Hashable, list[str]]:
    low = draw.randint(-9, 9)
    high = low + draw.randint(1, 9)
    ends = draw.choice(("[]", "[)", "(]", "()"))
    below, above = (r"\leq" if end in "[]" else "<" for end in ends)
    back = {"<": ">", r"\leq": r"\geq"}
    chain = rf"{low} {below} x {above} {high}"
    return (low, high, ends), [
        f"{ends[0]}{low},{high}{ends[1]}",
        rf"\left{ends[0]}{low}, \frac{{{2 * high}}}{{2}}\right{ends[1]}",
        chain,
        rf"{high} {back[above]} x {back[below]} {low}",
        rf"\{{x \mid {chain}\}}",
        rf"\{{x : {chain}\}}",
        rf"\{{x \in \mathbb{{R}} | {chain}\}}",
        rf"x \in {ends[0]}{low}, {high}{ends[1]}",
        rf"x {back[below]} {low} \text{{ and }} x {above} {high}",
    ]


def solutions(draw: Draw) -> tuple[Hashable, list[str]]:
    roots = draw.sample(range(-20, 20), draw.randint(2, 4))
    mixed = draw.sample(roots, len(roots))
    return frozenset(roots), [
        ",".join(map(str, roots)),
        ", ".join(map(str, mixed)),
        rf"\{{{', '.join(map(str, mixed))}\}}",
        rf"\left\{{{','.join(map(str, roots))}\right\}}",
        r" \text{ or } ".join(f"x={root}" for root in mixed),
        ", ".join(f"x = {root}" for root in roots),
    ]


def line(draw: Draw) -> tuple[Hashable, list[str]]:
    slope, start, times = draw.randint(2, 9), draw.randint(1, 9), draw.randint(2, 5)
    return (slope, start), [
        f"y={slope}x+{start}",
        rf"y = {start} + {slope} \cdot x",
        f"{slope}x-y+{start}=0",
        f"{times}y-{times * slope}x={times * start}",
        rf"{slope}x+{start}=y",
    ]


def surd(draw: Draw) -> tuple[Hashable, list[str]]:
    whole, root, under = draw.randint(2, 9), draw.choice((2, 3, 5, 6, 7, 10, 11)), draw.choice((3, 7, 11, 13))
    return Fraction(whole**2 * root, under**2), [
        rf"\frac{{{whole}\sqrt{{{root}}}}}{{{under}}}",
        rf"\dfrac{{{whole}\sqrt {root}}}{{{under}}}",
        rf"\frac{{{whole}}}{{{under}}}\sqrt{{{root}}}",
        rf"\frac{{\sqrt{{{whole**2 * root}}}}}{{{under}}}",
        rf"{whole}\sqrt{{{root}}}/{under}",
        f"{whole}*sqrt({root})/{under}",
        f"{whole}√{root}/{under}",
        rf"\frac{{{whole * root}}}{{{under}\sqrt{{{root}}}}}",
        rf"s=\frac{{{whole}\sqrt{{{root}}}}}{{{under}}}\text{{ cm}}",
    ]


def gaussian(draw: Draw) -> tuple[Hashable, list[str]]:
    real, imaginary = draw.randint(1, 20), draw.randint(2, 20)
    return (real, imaginary), [
        f"{real}+{imaginary}i",
        rf"{real} + {imaginary} \mathrm{{i}}",
        f"{imaginary}i+{real}",
        rf"{real}+i\cdot {imaginary}",
        rf"z={real}+{imaginary}i",
    ]


FAMILIES: tuple[Family, ...] = (
    scientific, grouped, fraction, product, interval, solutions, line, surd, gaussian,
)  # fmt: skip


def pairs(family: Family, draw: Draw) -> Iterator[tuple[str, str, bool]]:
    """An equal and, unless the values happen to be one, an unequal pair of the family."""
    value, ways = family(draw)
    other, others = family(draw)
    yield draw.choice(ways), draw.choice(ways), True
    if value != other:
        mine, theirs = draw.choice(ways), draw.choice(others)
        # 25% is 25 and a quarter, so that 25 and 1/4 are both right where one side has the sign.
        if "%" not in mine + theirs and "per" not in mine + theirs and "pct" not in mine + theirs:
            yield mine, theirs, False
