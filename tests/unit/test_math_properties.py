"""Properties of ``math``: one value in many spellings is equal, another value is not, and no text breaks it."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_envs.math.grade import grade

FAST = settings(max_examples=150, deadline=None, derandomize=True)
WHOLE = st.integers(-(10**7), 10**7)
FRACTIONS = st.builds(Fraction, WHOLE, st.integers(1, 10**4))
SMALL = st.integers(-9, 9)
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
FULL_WIDTH = str.maketrans("0123456789+-./", "０１２３４５６７８９＋－．／")


def equal(gold: str, answer: str, **options: object) -> bool:
    found = grade([gold], rf"\boxed{{{answer}}}", options)
    assert "reward" in found, found
    return bool(found["reward"] == 1.0)


def spellings(value: Fraction) -> list[str]:
    """A fraction as people write it."""
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    found = [
        f"{sign}{top}/{bottom}",
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        rf"\dfrac{{{sign}{top}}}{{{bottom}}}",
        rf"\frac{{{sign}{3 * top}}}{{{3 * bottom}}}",
        rf"\left({sign}{top}\right)\cdot\frac{{1}}{{{bottom}}}",
        f"{sign}{top} \\div {bottom}",
        f"x = {sign}{top}/{bottom}",
        f"{sign}{top}/{bottom}".translate(ARABIC),
        f"{sign}{top}/{bottom}".translate(FULL_WIDTH),
        f"{sign}{top}/{bottom}".replace("-", "−"),
        rf"{value.numerator * 100}/{bottom}\%",
        rf"{sign}{top}/{bottom}\text{{ cm}}",
    ]
    if top > bottom > 1:
        found += [
            rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}",
            f"{sign}{top // bottom} {top % bottom}/{bottom}",
        ]
    if bottom == 1:
        found += [
            f"{sign}{top:,}",
            f"{sign}{top:,}.0",
            f"{sign}{top:,}".replace(",", "{,}"),
            f"{sign}{top:,}".replace(",", r"\,"),
        ]
    if 10**8 % bottom == 0:
        found.append(f"{sign}{top * (10**8 // bottom) // 10**8}.{top * (10**8 // bottom) % 10**8:08}")
    return found


@FAST
@given(FRACTIONS, st.data())
def test_a_fraction_is_equal_in_all_its_spellings(value: Fraction, data: st.DataObject) -> None:
    a, b = (data.draw(st.sampled_from(spellings(value))) for _ in range(2))
    assert equal(a, b) and equal(b, a)


@FAST
@given(FRACTIONS, FRACTIONS, st.data())
def test_other_fractions_differ_in_all_their_spellings(x: Fraction, y: Fraction, data: st.DataObject) -> None:
    a, b = (data.draw(st.sampled_from(spellings(value))) for value in (x, y))
    assert equal(a, b) == equal(b, a) == (x == y)


@FAST
@given(st.integers(2, 3000), st.integers(2, 3000), st.integers(-3, 3))
def test_neighbours_differ_however_large_or_small_they_are(base: int, exponent: int, step: int) -> None:
    base = base % 99 + 2
    for a, b in (
        (f"{base}^{{{exponent}}}", f"{base}^{{{exponent}}}+{step}"),
        (f"{base}^{{-{exponent}}}", f"{base}^{{-{exponent + step}}}"),
        (f"{exponent}!", f"{exponent}!+{step}"),
        (rf"\sqrt{{2}}\cdot{base}^{{-{exponent}}}", rf"\sqrt{{2}}\cdot{base}^{{-{exponent + step}}}"),
        (f"e^{{-{exponent}}}", f"e^{{-{exponent + step}}}"),
    ):
        assert equal(a, b) == (step == 0)


@FAST
@given(SMALL, SMALL, SMALL, st.integers(1, 9))
def test_polynomials_are_equal_expanded_and_factored(a: int, b: int, c: int, d: int) -> None:
    factored = f"({d}x{a:+})(x{b:+}){c:+}"
    expanded = f"{d}x^2{a + d * b:+}x{a * b + c:+}"
    assert equal(factored, expanded) and equal(expanded, factored) and equal(f"y={expanded}", f"y = {factored}")
    assert not equal(factored, expanded + "+1") and not equal(factored, expanded + "+x") and not equal(expanded, "5")


@FAST
@given(st.lists(FRACTIONS, min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_tuples_have_an_order_and_sets_have_none(values: list[Fraction], random: object) -> None:
    texts = [f"{v.numerator}/{v.denominator}" for v in values]
    turned = texts[1:] + texts[:1]
    joined, other = ", ".join(texts), ", ".join(turned)
    assert equal(f"({joined})", rf"\left({joined}\right)") and not equal(f"({joined})", f"({other})")
    assert equal(rf"\{{{joined}\}}", rf"\{{{other}\}}") and equal(joined, other) and equal(joined, rf"\{{{other}\}}")
    assert not equal(rf"\{{{joined}\}}", rf"\{{{joined}, 10^9\}}") and not equal(joined, ", ".join(texts[:-1]))
    assert not equal(joined, other, order="strict") and equal(f"({joined})", f"({other})", order="free")


@FAST
@given(FRACTIONS, FRACTIONS, st.booleans(), st.booleans())
def test_intervals_and_inequalities_are_equal(x: Fraction, y: Fraction, left: bool, right: bool) -> None:
    x, y = min(x, y), max(x, y) + 1
    a, b = f"{x.numerator}/{x.denominator}", f"{y.numerator}/{y.denominator}"
    interval = f"{'(['[left]}{a},{b}{')]'[right]}"
    chain = f"{a} {'<' if not left else chr(92) + 'le'} t {'<' if not right else chr(92) + 'leq'} {b}"
    assert equal(interval, chain) and equal(chain, interval) and equal(interval, f"t \\in {interval}")
    assert not equal(interval, f"{'(['[not left]}{a},{b}{')]'[right]}")
    assert not equal(interval, f"{'(['[left]}{a},{b}+1{')]'[right]}")


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.text(max_size=200))
def test_any_text_is_right_or_wrong_and_never_breaks_the_grader(text: str) -> None:
    for reply in (text, rf"\boxed{{{text}}}", f"The answer is {text}", f"${text}$"):
        assert grade(["12345679"], reply, {})["reward"] in (0.0, 1.0)


SIGNS = "0123456789xyei+-*/^_(){}[]|,.;:!%$&=<> −"
COMMANDS = (
    *(
        r"\frac",
        r"\sqrt",
        r"\pi",
        r"\log",
        r"\sin",
        r"\binom",
        r"\pm",
        "**",
        r"\left",
        r"\right",
        r"\text{cm}",
        r"\cup",
    ),
    *(r"\infty", r"\le", r"\{", r"\}", r"\sum", r"\int", r"^\circ", r"\\", r"\begin{pmatrix}", r"\end{pmatrix}", "..."),
    *(r"\boxed{", r"\overline{3}", " or ", " and ", "10^{9}", "99!", r"\in"),
)
PIECES = st.sampled_from([*SIGNS, *COMMANDS])


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.lists(PIECES, max_size=30).map("".join),
    st.sampled_from(["5", r"\{1,2\}", "(0,1)", "x^2", "5 cm", r"\sum_{k=1}^n k"]),
)
def test_no_mathematical_nonsense_breaks_the_grader(text: str, gold: str) -> None:
    assert grade([gold], rf"\boxed{{{text}}}", {})["reward"] in (0.0, 1.0)
    found = grade([text], "5", {})
    assert ("reward" in found) != ("unreadable" in found)
