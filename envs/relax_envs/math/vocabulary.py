"""The words and commands that the grammar knows."""

from __future__ import annotations

from relax_envs.math.nodes import Const


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
HYPERBOLIC = ("sinh", "cosh", "tanh", "coth")
FUNCTIONS = {
    **{name: name for name in (*TRIGONOMETRIC, *HYPERBOLIC, "ln", "log", "lg", "exp", "min", "max", "gcd", "lcm")},
    **{name: name for name in ("abs", "floor", "ceil", "sgn", "cbrt", "fact", "binom")},
    **{"Abs": "abs", "Max": "max", "Min": "min", "factorial": "fact", "binomial": "binom", "ceiling": "ceil"},
    **{f"{arc}{name}": f"a{name}" for arc in ("arc", "a") for name in (*TRIGONOMETRIC, *HYPERBOLIC)},
    **{f"ar{name}": f"a{name}" for name in HYPERBOLIC},
}
"""As written -> the function."""
INVERSES = frozenset(FUNCTIONS.values()) & {f"a{name}" for name in FUNCTIONS}

GREEK = words(
    """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar imath jmath aleph"""
)
CONSTANTS = {"pi": Const("pi"), "e": Const("e"), "i": Const("i"), "infty": Const("inf")}
WORD_CONSTANTS = {
    **{word: Const("pi") for word in ("pi", "Pi", "PI")},
    **{word: Const("inf") for word in ("infinity", "Infinity", "inf", "oo", "infty")},
}
FOREIGN = words(
    """int iint iiint oint sum prod lim det partial nabla bmod mod neg lnot subset subseteq supset supseteq forall
    exists parallel perp cong iff Leftrightarrow sup limsup liminf arg Re Im overset underset cases vmatrix
    Vmatrix"""
)
"""Commands of mathematics that is left to math-verify."""
DECORATIONS = words("vec hat overline tilde angle triangle dot ddot")
ARGUMENTS = {"min": (1, 9), "max": (1, 9), "gcd": (2, 9), "lcm": (2, 9), "binom": (2, 2)}
"""How few and how many arguments a function takes, where it is not one."""
BRACKETS = {"lvert": "rvert", "lVert": "rVert", "lfloor": "rfloor", "lceil": "rceil"}
CALLED = "fghFGHPQpqTSVuvy"
"""Letters that name a function where a bracket follows; they are evaluated like a product, whichever it is."""
JOINING = words("and or in union mod U")
"""Words that end an expression."""
SHORT_WORDS = words(
    """so is it we get the are be to of at as by if in on no an am do he me my up us go or not for and but has had can
    let its was one two ten six then thus that this with from when have also into only some more less per out
    all any now yes ans since you your they here what how why who"""
)
"""Words of prose that are no product of variables, though they are short."""
NO_UNIT = words(
    """or and not is are was if then so the a an of to from where when because since with for as that which but hence
    thus both either neither no none by on at it be we have import eval exec lambda all solution solutions true
    false yes mod sqrt infinity infty choose over times divided plus minus equals alpha beta gamma delta epsilon
    zeta theta iota kappa sigma omega frac binom arcsin arccos arctan asin acos atan sinh cosh tanh floor ceil
    union left right"""
)
"""Words behind a number that name nothing that is counted."""
