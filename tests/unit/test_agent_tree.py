"""The tree of what was said: how much of a conversation is known, whatever a client does to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_core.types import Message, ToolCall, message, user
from relax_envs.agent.tree import Node, Tree, reply_message, same


def test_nothing_is_known_at_first() -> None:
    tree = Tree("begin")
    node, rest = tree.find([user("a")])
    assert node is tree.root and rest == (user("a"),)


def test_the_longest_beginning_is_found() -> None:
    tree = Tree(0)
    tree.add(tree.root, [user("a")], message("assistant", "b"), 1)
    first, rest = tree.find([user("a"), message("assistant", "b"), user("c")])
    assert first.where == 1 and first.depth == 1 and rest == (user("c"),)
    tree.add(first, [user("c")], message("assistant", "d"), 2)
    said = [user("a"), message("assistant", "b"), user("c"), message("assistant", "d"), user("e")]
    node, rest = tree.find(said)
    assert node.where == 2 and node.depth == 2 and rest == (user("e"),)
    said[3] = message("assistant", "rewritten")
    node, rest = tree.find(said)
    assert node is first and rest == tuple(said[2:])
    said[0] = user("other")
    assert tree.find(said) == (tree.root, tuple(said))


def test_white_space_and_ids_do_not_make_another_reply() -> None:
    given = reply_message("  think\n", [ToolCall("add", {"a": 1, "b": [2.0, "é"]}, "call00000")])
    assert same(given, message("assistant", "think", ToolCall("add", {"b": [2.0, "é"], "a": 1}, "x")))
    assert not same(given, message("assistant", "think", ToolCall("add", {"b": [2.0, "e"], "a": 1}, "call00000")))
    assert not same(given, message("assistant", "thinks", *given.parts[1:]))
    assert not same(given, message("user", "think", *given.parts[1:]))
    assert same(reply_message("", []), message("assistant", ""))


def test_of_equal_replies_the_one_with_the_ids_then_one_that_has_no_answer_then_the_newest() -> None:
    tree = Tree(0)

    def call(id: str) -> Message:
        return reply_message("", [ToolCall("look", {}, id)])

    for i in (1, 2, 3):
        tree.add(tree.root, [user("a")], call(f"c{i}"), i)
    assert [tree.find([user("a"), call(f"c{i}"), user("b")])[0].where for i in (1, 2, 3)] == [1, 2, 3]
    unknown = [user("a"), call("mine"), user("b")]
    assert tree.find(unknown)[0].where == 3
    tree.add(tree.find(unknown)[0], [user("b")], message("assistant", "end"), 4)
    assert tree.find(unknown)[0].where == 2


def test_long_conversations_are_no_matter() -> None:
    tree, said = Tree(0), list[Message]()
    for i in range(50):
        node, rest = tree.find([*said, user(str(i))])
        assert len(rest) == 1 and node.depth == i
        tree.add(node, rest, message("assistant", "ok"), i + 1)
        said += [*rest, message("assistant", "ok")]
    deep: Tree[int] = Tree(0)
    node = deep.root
    for i in range(5000):
        deep.add(node, [user("x")], message("assistant", "ok"), i)
        node = node.after[0]
    found, rest = deep.find([m for _ in range(5000) for m in (user("x"), message("assistant", "ok"))])
    assert found is node and rest == ()


WORDS = st.sampled_from(["a", "b"])


@given(st.lists(st.tuples(WORDS, WORDS), max_size=30), st.lists(WORDS, max_size=8))
def test_what_is_found_is_what_was_said(turns: list[tuple[str, str]], words: list[str]) -> None:
    """Against the plain way: try every beginning of the conversation."""
    tree: Tree[tuple[Message, ...]] = Tree(())
    for at, (asked, reply) in enumerate(turns):
        node = tree.root
        for _ in range(at % 4):
            node = node.after[-1] if node.after else node
        path = (*node.where, user(asked), message("assistant", reply))
        tree.add(node, [user(asked)], message("assistant", reply), path)
    known = {()} | {n.where for n in _nodes(tree)}
    said = [message("assistant", w) if i % 2 else user(w) for i, w in enumerate(words)]
    node, rest = tree.find(said)
    assert (*node.where, *rest) == tuple(said)
    assert len(node.where) == max(n for n in range(len(said) + 1) if tuple(said[:n]) in known)


def _nodes(tree: Tree[tuple[Message, ...]]) -> list[Node[tuple[Message, ...]]]:
    found, new = list[Node[tuple[Message, ...]]](), list(tree.root.after)
    while new:
        found += new
        new = [child for node in new for child in node.after]
    return found
