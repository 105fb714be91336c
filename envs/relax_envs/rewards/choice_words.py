"""The words and signs by which a text states a choice, as regular expressions; gaps in them are bounded."""

from __future__ import annotations

import re

# --- cleaning -------------------------------------------------------------------------------------------------------

WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mathit|operatorname)\s?\{([^{}]{0,500})\}")
NOISE = re.compile(r"\*+|`+|__+|~~+|\\[()\[\]{},;!]|\$|^[ \t]{0,9}(?:#{1,6}|>)[ \t]", re.MULTILINE)
WIDE = str.maketrans(
    dict(zip("（）［］【】「」『』：．，；？！‘’“”", "()[][][][]:.,;?!''\"\"", strict=True))
    | {chr(0xFEE0 + code): chr(code) for code in (*range(48, 58), *range(65, 91), *range(97, 123))}
)
ENDS = " \t\r\n.,;:!?\"'。，；"

# --- what a choice looks like, and what stands around it --------------------------------------------------------------

LATIN = r"[A-Za-z0-9_\u00c0-\u024f]"
NO_LETTER = rf"(?!{LATIN})(?![.,:]\d|['-]\w|\s?=[^>])"
NAMED = r"(?:(?:\b(?:options?|choices?|letters?|answers?)\b|选项|选择|答案)[ \t]{0,3}:?[ \t]{0,3})?"
AND = re.compile(
    r"[ \t]{0,3}(?:(?:,[ \t]?)?(?:\band\b|\bas well as\b|\bplus\b|&|\+|和|及|与|以及)|[,;、/])[ \t]{0,3}", re.IGNORECASE
)
MAYBE = r"(?:maybe|possibly|perhaps|probably|else|even|could be|might be|may be)"
OR = re.compile(
    rf"[ \t]{{0,3}}(?:,[ \t]?)?(?:(?:\band[ \t]?/[ \t]?)?\bor\b(?:[ \t]{MAYBE}\b)?"
    rf"|\bvs\b\.?|\bversus\b|或者?|还是)[ \t]{{0,3}}"
    rf"|,[ \t]{MAYBE}\b[ \t]{{1,3}}",
    re.IGNORECASE,
)
SPLIT = re.compile(
    r"(?<=\bor)[ \t]{0,9}\n\s{0,9}"
    r"|[ \t]{0,9}\n\s{0,9}(?=(?:and/)?or\s{1,9}[(\[]?(?-i:[A-Z])[)\].,?]{0,2}\s{0,9}(?:\n|\Z))",
    re.IGNORECASE,
)
"""A line end beside an "or"."""
HEDGED = re.compile(r"\b(?:between|any of|(?:any|either) one of|one of|among)(?:\sthe)?\s{1,3}[(\[]?$", re.IGNORECASE)
PRONOUN = re.compile(
    r"\s{1,3}(?:think|thought|believe|guess|suppose|say|said|am|was|would|will|can|cannot|could|choose|chose|pick|go|"
    r"have|had|do|did|know|assume|feel|see|mean|read|lean|suspect|reckon|hope|just|also|really|still|might|may)\b",
    re.IGNORECASE,
)
"""What stands behind the pronoun "I", and not behind a choice of that name."""
RETRACTED = (
    r"(?:[?.…,!;\n]|\s[–—-])\s{0,3}(?:oh,?\s)?"
    r"(?:no|nope|wait|hmm|actually|correction|sorry|scratch that|i mean|or rather)"
    r"\b[,.:;!…\s–—-]{1,5}(?:(?:no|wait|actually|sorry|rather|i mean|it's|it is|make that)\b[,.:;!…\s]{1,4}){0,2}"
)
"""How a choice is taken back: "B? No, A"."""
DELIMITER = re.compile(r"[ \t]?[.:)](?=[ \t\n]|[^\W\d_]|$)|[ \t]{1,3}[-–—](?=[ \t])|、")
CLAUSE = re.compile(
    r"\s{1,3}(?:is|are|was|were|isn't|aren't|wasn't|does|doesn't|do|don't|did|didn't|can|can't|cannot|could|would|will|"
    r"won't|has|have|had|seems?|looks?|says?|fails?|describes?|refers?|contradicts?)\b",
    re.IGNORECASE,
)
ENDED = re.compile(
    r"\s*$|[ \t]{0,3}[.,;:!?)\]\n。、(]|[ \t]{1,3}(?:because|since|as|for|due|based|given|[-–—→]|=>)(?!\w)"
    r"|[\u3000-\u9fff]",
    re.IGNORECASE,
)
WRONG = re.compile(
    r"['\")\].]{0,2}[ \t]{0,3}(?:(?:is|are|was|were|seems?|looks?)\s(?:(?:clearly|also|definitely|simply|just)\s)?"
    r"(?:not|wrong|incorrect|false|out|impossible|eliminated|excluded|invalid|ruled)\b"
    r"|(?:isn't|aren't|wasn't|can't|cannot|doesn't|does not|can not)\b|(?:选项)?[是都]?(?:不|错|排除)"
    r"|[ \t]?\?\s{0,3}(?:no|nope)\b(?!\s(?:doubt|question)))",
    re.IGNORECASE,
)
NEGATED = re.compile(
    r"(?:\b(?:not|isn't|aren't|wasn't|never|neither|nor|exclud(?:e|es|ed|ing)|except|eliminat(?:e|es|ed|ing)|"
    r"reject(?:s|ed|ing)?|(?:cannot|can't|not|couldn't) be|rul(?:e|es|ed|ing) out|than|unlike|without|instead of)"
    r"|不是|不选|不能选|排除|并非|而非|非|不会是|不)\s?"
    r"(?:(?:the|(?-i:an?)|either|both|option|choice|answer|letter)\s|选项 ?)*[(\['\"]?$|n't\s$",
    re.IGNORECASE,
)
WRONG_ANSWER = re.compile(r"(?:\b(?:wrong|incorrect|bad|false|worst|not the)|错误的?|不正确的?)\s?$", re.IGNORECASE)

# --- where an answer is stated ----------------------------------------------------------------------------------------

FILL = (
    r"(?:(?:therefore|thus|clearly|definitely|indeed|most|likely|probably|simply|just|either|both|then|the|to|be|that|"
    r"it's|it|is|must|surely|certainly|still|now|actually|correct|right|best|hence|so|only|my|final)[,:]?\s{1,3})"
)
STRONG = (
    r"(?:\b(?:answers?|solution|guess|selection|conclusion|(?:correct|right|best)\s(?:options?|choices?|ones?|letters?|statements?))"
    rf"\b[^.\n:=]{{0,80}}?(?:\b(?:is|are|be|was)\b|[:=]|→|->)\s{{0,9}}{FILL}{{0,5}}"
    r"|\b(?:choos(?:e|ing)|pick(?:ing|ed)?|select(?:ing|ed)?|go(?:ing)?\swith|went\swith|opt\sfor|settle\son|chose)"
    rf"[ \t]{{1,3}}{FILL}{{0,3}}"
    r"|\bans\.[ \t]{0,3}|(?:答案|故选|而是|应选|应该选|选择|正确选项|选项|选|正解|答え|정답)[^。\n,:;A-Za-z0-9]{0,12}?"
    r"[是为為选:=は은는]{0,3}[ \t]{0,3})"
)
WEAK = (
    r"(?:(?:\b(?:so|but|therefore|thus|hence|consequently|then)\b,?|=>|⇒|→|∴|\b(?:it|that)(?:'s|\sis|\smust\sbe|"
    r"\shas\sto\sbe|\sshould\sbe|\swould\sbe)\b|\bmust\sbe\b)[ \t]{1,3}|(?:所以|因此)[ \t]{0,3})"
    rf"{FILL}{{0,5}}"
)
PRAISED = re.compile(
    r"[)\]'\"]?[ \t]{1,3}(?:is|are|must be|seems?(?: to be)?|looks?|would be|has to be|appears?(?: to be)?)\s"
    r"(?:(?:the|my|clearly|therefore|thus|indeed|definitely|most|likely|probably|also|final|only|both|obviously)\s)*"
    r"(?:correct|right|best|true|answers?|accurate)\b|[)\]]?\s?(?:选项)?是?(?:正确|对的|最佳)",
    re.IGNORECASE,
)
LEADS = re.compile(
    r"(?:^|[:–—-]|\b(?:is|be|was|it's|that's|think|believe|guess|say|with|for|probably|maybe|likely|definitely|clearly|"
    r"surely|certainly|perhaps|must|or|and|both|either|between|of|in|es|est|ist)|,)\s{0,3}$",
    re.IGNORECASE,
)
