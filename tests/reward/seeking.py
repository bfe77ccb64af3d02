r"""Intervals in words, notes of positive letters, and what other draws that seek the edge found.

Each line has a truth, ways of it that were once judged wrong, and answers that are not it.
"""

# fmt: off
TRUTHS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("[-2, 7]",
     ("from -2 to 7 inclusive", "from -2 to 7, inclusive", "all x from -2 to 7, inclusive",
      "between -2 and 7 inclusive",
      "x is between -2 and 7, inclusive", r"\text{from } -2 \text{ to } 7 \text{ inclusive}",
      "numbers from -2 to 7, including endpoints", "from -2 (inclusive) to 7 (inclusive)",
      "from -2 to 7 both included"),
     ("from -2 to 7 exclusive", "between -2 and 7", "strictly between -2 and 7", "from -2 to 7",
      "from -2 to 8 inclusive",
      "integers from -2 to 7 inclusive", "from -2 to 7 not inclusive", "from -2 (inclusive) to 7 (exclusive)",
      "from 7 to -2 inclusive")),
    ("(0, 2)", ("strictly between 0 and 2", "from 0 to 2 exclusive", "between 0 and 2, exclusive",
                "between 0 and 2, excluding endpoints"),
     ("between 0 and 2, inclusive", "strictly between 0 and 3", "from 0 to 2", "strictly between 0 and 2, inclusive")),
    ("x > 2", ("all real numbers greater than 2", "all x greater than 2", "real numbers strictly greater than 2",
               "numbers that are greater than 2"),
     ("all real numbers greater than or equal to 2", "all real numbers less than 2", "all integers greater than 2",
      "no numbers greater than 2", "all real numbers greater than 2 or less than 0")),
    (r"\mathbb{R}", ("every real number", "any real x"), ("every rational number", "not every real number")),
    ("xy = 0", ("x = 0 or y = 0", r"y=0 \text{ or } x=0"), ("x = 0 and y = 0", "x = 0", "x=0 or y=1", "x=0, y=0")),
    ("x^2 - y^2 = 0", ("x=y or x=-y",), ("x=y", "x=y or x=-2y", "x=y, x=-y, x=0")),
    ("x = 0 or y = 0", ("xy=0", "3xy = 0"), ("xy=1", "x+y=0", "x^2y=1")),
    ("(x-1)(x-2) = 0", (), ("x=1 or x=2",)),  # an equation that is to be solved is no answer
    ("x=1 or x=2", (), ("(x-1)(x-2) = 0",)),
    (r"v = f\lambda, f > 0", (r"v = f\lambda", r"v=\lambda f, f>0"),
     (r"v = \frac{\lambda}{f}", r"v = f\lambda, f<0", r"v=f\lambda, f > 1", r"v = f\lambda, f \ge 0")),
    (r"s = \frac{1}{f}, f, s > 0", (r"s=\frac1f", r"s = 1/f, s > 0, f > 0"), (r"s=f", r"s=\frac1f, f, s < 0")),
    (r"\sqrt{ab}, a, b > 0", (r"\sqrt{ab}",), (r"\sqrt{a+b}", "a, b > 0")),
    ("y^2 = 4x, x > 0", (), ("y^2 = 4x",)),  # a part of the curve
    (r"2 \pm \sqrt{3}", (r"x_{1,2} = 2 \pm \sqrt3", r"x_{12} = 2\pm\sqrt3"), (r"x_{1,2} = 3 \pm \sqrt2",)),
    (r"x = 2 \pm \sqrt{3}", (r"x_{1,2} = 2 \pm \sqrt3",), (r"x_{1,2} = -2 \pm \sqrt3", r"y_{1,2} = 2 \pm \sqrt3")),
    (r"\lambda_1 = 1, \lambda_2 = 3", (r"\lambda_1=3, \lambda_2=1", "[3, 1]", "[1., 3.]"),
     (r"\lambda_1=3, \lambda_2=2", "[3]", "[3, 1, 1]")),
    ("x_1 = 1, x_2 = 3", ("x_1=1,x_2=3",), ("x_1=3, x_2=1",)),
    (r"250\text{ cm}^3", ("250 mL", "0.25 L", "250 cubic centimeters"), ("250 L", "2.5 L", "250 mm^3", "0.25 mL")),
    (r"\$18.50", ("18.50 dollars", "1850 cents"), ("18.50 euros", "18.50 yuan", "18.50 cents")),
    (r"\$1{,}000{,}000", ("1 million dollars",), ("1 million euros",)),
    (r"\text{12 seconds}", ("12 secs", "12 sec"), ("12 minutes", "12 mins")),
    (r"25\%", ("twenty-five percent (25%)", "25% (twenty-five percent)", r"twenty-five per cent (25\%)"),
     ("twenty-five percent (26%)", "twenty-five apples (25%)", "twenty percent (25%)")),
    ("33", ("f(1) + f(2) = 33", "f(3) - f(2) = 33"), ("f(1) + f(2) + 1 = 33", "f(33)", "f(1) + f(2) = 34")),
    (r"\rho = 2\cos\theta", (r"r = 2\cos\theta", "r = 2*cos(theta)"), (r"r = 2\sin\theta", r"x = 2\cos\theta")),
    (r"\overline{AB} \parallel \overline{CD}", (r"AB \parallel CD", "AB ∥ CD", r"BA \parallel CD"),
     ("AB ⊥ CD", "AC ∥ BD", "AB ∥ CE", "AB = CD")),
    (r"\vec{a} \cdot \vec{b} = 5", ("5",), ("-5", r"\vec{a} \cdot \vec{c} = 5")),
    (r"7 \text{ men}, 5 \text{ women}", ("7 men, 5 women", "7 men and 5 women"),
     ("5 men, 7 women", "7 men", "7 men, 6 women")),
    (r"n \equiv 1 \pmod 4", ("4k+1", "n = 4k+1", "n ≡ 1 (mod 4)"), ("4k-1", "4k", "2k+1", "4k+1+m")),
    ("x = 3, y = -1", ("x=3 y=-1", "x = 3\ny = -1"), ("x=3 y=1", "x=-1 y=3", "x=3 -1")),
    ("(0, 0), (1, 1)", ("{x: 0, y: 0}, {x: 1, y: 1}",), ("{x: 0, y: 1}, {x: 1, y: 0}", "{x: 0, y: 0}")),
    (r"\frac{3}{4}", ("^3/_4", "^{3}/_{4}"), ("^4/_3", "^3/_{41}")),
]
# fmt: on
