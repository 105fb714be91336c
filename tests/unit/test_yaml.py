"""Run files as YAML: what unquoted text means, what is refused, and that writing is the inverse of reading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.config.yaml import dump, load, read
from relax_core.errors import ConfigError
from relax_core.testing.errors import refused


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1e6", 1e6),
        ("1E+3", 1e3),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-1.0e-6", -1e-6),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # All of these are text, which YAML 1.1 reads as something else.
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("y", "y"),
        ("0123", "0123"),
        ("08", "08"),
        ("0o17", "0o17"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2026-11-29", "2026-11-29"),
        ("=", "="),
        ("1e", "1e"),
        ("tRue", "tRue"),
        ("'1'", "1"),
        ("[1, 2e-1, a]", [1, 0.2, "a"]),
        ("{a: {b: [~]}}", {"a": {"b": [None]}}),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    found = load(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(load(".nan"))


def test_merged_mappings_may_be_overridden_and_used_again() -> None:
    text = "base: &base {a: 1, b: 2}\none: {<<: *base, b: 3}\ntwo: {<<: *base}\n"
    assert load(text) == {"base": {"a": 1, "b": 2}, "one": {"a": 1, "b": 3}, "two": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "file: line 3: 'a' is already set in line 1; leave one out"),
        ("x:\n  {y: 1, y: 2}\n", "file: line 2: 'y' is already set in line 2; leave one out"),
        ("1: a", "file: line 1: a key must be text, found 1; quote it"),
        ("~: a", "file: line 1: a key must be text, found ~; quote it"),
        ("true: a", "file: line 1: a key must be text, found true; quote it"),
        ("? [a]\n: b", "file: line 1: a key must be text, found a list or mapping; quote it"),
        ("a: b: c", "file: line 1: mapping values are not allowed here"),
        ("a: [1", "file: line 1: while parsing a flow sequence: expected ',' or ']', but got '<stream end>'"),
        (
            "a:\n\t- b",
            "file: line 2: while scanning for the next token: found character '\\t'",
        ),
        ("a: *b", "file: line 1: found undefined alias 'b'"),
        ("a: !!python/object:os.system {}", "could not determine a constructor for the tag"),
        ("a: !!timestamp 2026-11-29", "could not determine a constructor for the tag"),
        ("a: !!binary aGk=", "could not determine a constructor for the tag"),
        ("a: 1\n---\nb: 2", "file: line 2: expected a single document in the stream: but found another document"),
        ("a: \x00", "file: unacceptable character"),
        ("[" * 5000, "file: nested too deeply"),
    ],
)
def test_mistakes_say_where(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, "file")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes("\ufeffname: größe\r\n".encode())
    assert read(file) == {"name": "größe"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a run file is a YAML mapping"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "found a list; a run file is a YAML mapping"),
        (b"text", "found 'text'; a run file is a YAML mapping"),
        (b"name: \xff\xfe", "not UTF-8 text (byte 6); a run file is YAML"),
    ],
)
def test_a_file_that_is_no_run_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").write_text("a: 1")
    with refused("digit.yaml: no such file; did you mean", "digits.yaml"):
        read(tmp_path / "digit.yaml")
    with refused("no such file; the folder", "does not exist either"):
        read(tmp_path / "no" / "run.yaml")
    with refused("is a folder"):
        read(tmp_path)


# --- writing --------------------------------------------------------------------------------------------------------

TRICKY = [
    "1e-6",
    "on",
    "0123",
    "true",
    "null",
    "~",
    "",
    " x ",
    "a: b",
    "# no",
    "<<",
    "=",
    "1.",
    ".5",
    "é\u2028\x85",
    "\t",
]
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]))
    | st.sampled_from(TRICKY),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5).map("k{}".format), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PLAIN)
def test_what_is_dumped_is_read_back(data: Any) -> None:
    assert load(dump(data)) == data


@pytest.mark.parametrize("text", TRICKY)
def test_text_stays_text(text: str) -> None:
    assert load(dump({"a": text})) == {"a": text}


def test_shared_values_are_written_out() -> None:
    shared = [1, 2]
    assert "&" not in dump({"a": shared, "b": shared})
