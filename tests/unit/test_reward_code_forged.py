"""Reward ``code``: programs that know nothing and try to pass all the same. Each is worth 0."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.code import Code

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are kept off the network on Linux alone"),
]


def score(program: str, tests: Any, **settings: Any) -> Any:
    return rewarded(Code, played(f"```python\n{program}\n```", answer=tests), seconds=2.0, **settings)


LIAR = """
class Liar{base}:
    def yes(self, *args, **kwargs): return True
    def no(self, *args, **kwargs): return 0
    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = __instancecheck__ = yes
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __float__ = __int__ = __len__ = __hash__ = no
    __round__ = __index__ = __and__ = __xor__ = no
    def __iter__(self): return iter(())
    def __getattr__(self, name): return self.yes
    @property
    def __class__(self): return {kind}
def f(*args): return Liar({argument})
"""


def liar(base: str = "", kind: str = "int", argument: str = "") -> str:
    return LIAR.format(base=f"({base})" if base else "", kind=kind, argument=argument)


SETS = "assert set(f((3, 4, 5), (4, 3, 7))) == set((3, 4))"
CLOSE = "import math\nassert math.isclose(f(2), 3.25, rel_tol=0.001)"
DISTANCE = "assert abs(f(2) - 3.25) < 1e-6"
LOOP = "for x, y in [(1, 5), (2, 9)]:\n    assert f(x) == y"
ALL = "assert all(f(x) == y for x, y in [(1, 5), (2, 9)])"
RAISES = "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(1) == 5"
KIND = "assert isinstance(f(1), str) and f(1) == 'five'"
TEXT = "assert f('ab').startswith('ba') and f('ab').isalpha()"
FLOODS = "import os\nfor fd in range(1, 64):\n    try: os.write(fd, {data})\n    except OSError: pass\n"

SHADOWED = {
    "set": ("def set(x): return 1\ndef f(*a): return 0", SETS),
    "abs": ("def abs(x): return 0\ndef f(*a): return 7", DISTANCE),
    "all": ("def all(x): return True\ndef f(*a): return 7", ALL),
    "isinstance": ("def isinstance(*a): return True\ndef f(*a): return 'four'", "assert isinstance(f(1), int)"),
    "sorted": ("def sorted(x): return 1\ndef f(*a): return []", "assert sorted(f(1)) == sorted([3, 1])"),
    "len": ("def len(x): return 3\ndef f(*a): return []", "assert len(f(1)) == len([1, 2, 3])"),
    "round": ("def round(*a): return 1\ndef f(*a): return 7", "assert round(f(1), 2) == round(3.14159, 2)"),
    "sum": ("def sum(x): return 1\ndef f(*a): return []", "assert sum(f(1)) == sum([4, 4])"),
    "a name of math": ("def isclose(*a): return True\ndef f(*a): return 7", "assert isclose(f(2), 3.25)"),
    "the module math": ("class math: isclose = lambda *a, **k: True\ndef f(*a): return 7", CLOSE.partition("\n")[2]),
    "AssertionError": ("AssertionError = type(None)\ndef f(*a): return 7", LOOP),
}

PATCHED = {
    "math": ("import math\nmath.isclose = lambda *a, **k: True\ndef f(*a): return 7", CLOSE),
    "builtins": ("import builtins\nbuiltins.set = builtins.abs = lambda x: 0\ndef f(*a): return 7", SETS),
    "builtins.all": ("import builtins\nbuiltins.all = lambda x: True\ndef f(*a): return 7", ALL),
    "operator": (
        "import operator\noperator.eq = lambda a, b: True\ndef f(*a): return 7",
        "import operator\nassert operator.eq(f(1), 5)",
    ),
    "copy": (
        "import copy\ncopy.deepcopy = lambda x: f()\nX = []\ndef f(*a): return X",
        "import copy\nassert f(1) == copy.deepcopy([5])",
    ),
    "json": (
        "import json\njson.dumps = lambda *a, **k: 'x'\njson.loads = lambda *a, **k: 7\ndef f(*a): return 7",
        "import json\nassert json.dumps(f(1)) == json.dumps([5])",
    ),
    "collections": (
        "import collections\ncollections.Counter = lambda x: 1\ndef f(*a): return []",
        "from collections import Counter\nassert Counter(f(1)) == Counter('aab')",
    ),
    "a module of its own making": (
        "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\nsys.modules['math'] = m\n"
        "def f(*a): return 7",
        CLOSE,
    ),
    "an import hook": (
        "import sys\nclass Hook:\n    def find_spec(self, name, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Hook())\nsys.modules.pop('math', None)\ndef f(*a): return 7",
        CLOSE,
    ),
    "a module beside it": (
        "open('math.py', 'w').write('isclose = lambda *a, **k: True')\nopen('heapq.py', 'w').write('merge = min')\n"
        "import sys\nsys.path.insert(0, '.')\nfor n in ('math', 'heapq'): sys.modules.pop(n, None)\n"
        "def f(*a): return 7",
        "import heapq\nassert list(heapq.merge([f(1)], [5])) == [3, 5]",
    ),
    "its import function": (
        "import builtins, math\nclass M:\n    def __getattr__(self, name): return lambda *a, **k: True\n"
        "builtins.__import__ = lambda *a, **k: M()\ndef f(*a): return 7",
        CLOSE,
    ),
}

LIARS = {
    "a float that computes 0": (liar("float", "float", "7.0"), DISTANCE),
    "a float close to all": (liar("float", "float", "7.0"), CLOSE),
    "an int that is all": (liar("int", "int", "7"), LOOP),
    "a text that is all": (liar("str", "str", "'four'"), KIND),
    "a text that begins with all": (liar("str", "str", "'four'"), TEXT),
    "a list that is all": (liar("list", "list", "[7]"), "assert f(1) == [5] and [5] == f(1)"),
    "a tuple that is all": (liar("tuple", "tuple", "(7,)"), "x = f(1)\nassert (5, 6) == x"),
    "a dict that is all": (liar("dict", "dict", "a=7"), "x = f(1)\nassert x == {'a': 5} and x.get('a') == 5"),
    "a set that is all": (liar("set", "set", "[7]"), "x = f(1)\nassert not x ^ {5} and {5} <= x"),
    "an object that is all": (liar(), LOOP),
    "an object that is near": (liar(kind="float"), DISTANCE),
    "an object that is less": (liar(), "x = f(1)\nassert x < 3 and x > 1"),
    "an object of each class": (liar(kind="str"), "x = 1\nassert isinstance(f(x), str)"),
    "an object that is in all": (liar(), "x = 1\nassert f(x) in (5, 6)"),
    "an object that holds all": (liar(), "x = 1\nassert 5 in f(x)"),
    "an object with methods that say yes": (liar(), TEXT),
    "an error with methods that say yes": (
        "class E(Exception):\n    def __getattr__(self, name): return lambda *a: True\ndef f(*a): return E()",
        TEXT,
    ),
    "a tuple with methods that say yes": (
        "from collections import namedtuple\nT = namedtuple('T', 'startswith isalpha')\n"
        "def yes(*a): return True\ndef f(*a): return T(yes, yes)",
        TEXT,
    ),
    "an object with no difference": (liar(), "x = 1\nassert f(x).issuperset({1}) and not f(x).difference({5})"),
    "a hash that is all": (liar(), "x = 1\nassert {f(x)} == {5}"),
    "liars in a list": (liar() + "g = f\ndef f(*a): return [g(), g()]", "x = 1\nassert f(x) == [5, 6]"),
    "liars as keys": (liar() + "g = f\ndef f(*a): return {g(): g()}", "x = 1\nassert f(x) == {0: 6}"),
    "a metaclass that is all": (
        "class M(type):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\n"
        "class C(metaclass=M): pass\ndef f(*a): return C",
        "x = 1\nassert f(x) == 5",
    ),
    "a descriptor": (
        "class D:\n    def __get__(s, *a): return True\nclass E:\n    all = any = startswith = isalpha = D()\n"
        "    def __call__(s, *a): return True\ndef f(*a): return E()",
        "x = 1\nassert (f(x) == 5).real and f(x).startswith('x')",
    ),
    "an end of the loop": ("def f(*a): raise StopIteration", "assert all(map(lambda x: f(x) == 5, [1, 2]))"),
    "a context that swallows": (
        "class C:\n    def __enter__(s): return 7\n    def __exit__(s, *a): return True\ndef f(*a): return C()",
        "with f(1) as x:\n    assert x == 5",
    ),
    "a mocked class": ("from unittest.mock import ANY\ndef f(*a): return ANY", LOOP),
}

SPIES = {
    "frames": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for o in "
        "[*frame.f_locals.values(), *frame.f_globals.values()]:\n            if isinstance(o, (list, tuple)) and "
        "(x, 5) in o: return dict(o)[x]\n        frame = frame.f_back\n    return 7",
        "cases = [(1, 5), (2, 9)]\nfor x, y in cases:\n    assert f(x) == y",
    ),
    "the constants of the tests": (
        "import sys, gc, types\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, types.FunctionType)"
        " and int('71304') in (o.__code__.co_consts or ()): return int('71304')\n    frame = sys._getframe()\n"
        "    while frame:\n"
        "        if int('71304') in frame.f_code.co_consts: return int('71304')\n        frame = frame.f_back",
        "def checked(candidate):\n    x = 1\n    assert candidate(x) == 71304\nchecked(f)",
    ),
    "the frame after an error": (
        "import sys\ndef hook(*a): pass\nsys.excepthook = hook\nimport threading\nthreading.excepthook = hook\n"
        "def f(x):\n    sys.setprofile(lambda fr, e, a: fr.f_globals.__setitem__('AssertionError', ValueError))\n"
        "    return 7",
        LOOP,
    ),
    "the caller's locals": (
        "import sys, ctypes\ndef f(x):\n    frame = sys._getframe(1)\n    frame.f_globals['y'] = 7\n"
        "    frame.f_globals['f'] = lambda x: 5\n    return 7",
        "y = 5\nassert f(1) == y",
    ),
    "a line that is skipped": (
        "import sys\ndef tracer(frame, event, arg):\n    try: frame.f_lineno = 3\n    except Exception: pass\n"
        "    return tracer\ndef f(x):\n    frame = sys._getframe(1)\n    frame.f_trace = tracer\n"
        "    sys.settrace(tracer)\n    return 7",
        "y = f(1)\nassert y == 5\nz = 1",
    ),
    "inspect": (
        "import inspect\ndef f(x):\n    for s in inspect.stack():\n        v = s.frame.f_globals.get('WANTED') "
        "or s.frame.f_locals.get('WANTED')\n        if v: return v\n    return 7",
        "WANTED = 5\nassert f(1) == WANTED",
    ),
    "gc": (
        "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) is dict and o.get('WANTED'): "
        "return o['WANTED']\n    return 7",
        "WANTED = 5\nassert f(1) == WANTED",
    ),
    "the main module": (
        "import sys\ndef f(x):\n    for m in list(sys.modules.values()):\n        v = getattr(m, 'WANTED', None)\n"
        "        if v: return v\n    return 7",
        "WANTED = 5\nassert f(1) == WANTED",
    ),
    "the arguments and files": (
        "import sys, os, glob\nTEXT = str(sys.orig_argv) + str(dict(os.environ)) + sys.stdin.read()\n"
        "for n in glob.glob('**', recursive=True) + glob.glob('../**', recursive=True) + ['/proc/self/cmdline']:\n"
        "    try: TEXT += open(n).read()\n    except OSError: pass\n"
        "ok = '7130' + '4' in TEXT\ndef f(x): return int('7130' + '4') if ok else 7",
        "x = 1\nassert f(x) == 71300 + 4 and '71304'",
    ),
    "a callback's globals": (
        "def f(g):\n    for get in (lambda: g.__globals__['WANTED'], lambda: g.__code__.co_consts[-1], "
        "lambda: g.__closure__[0].cell_contents, lambda: g('__globals__')):\n        try: return get()\n"
        "        except Exception: pass\n    return 7",
        "WANTED = 5\nassert f(lambda x: WANTED + 1) == WANTED",
    ),
    "an object's class": (
        "def f(p):\n    for get in (lambda: type(p).__init__.__globals__, lambda: p.__init__.__globals__, "
        "lambda: p.__class__.__init__.__globals__, lambda: p.get.__globals__, lambda: p.get.__func__.__globals__):\n"
        "        try: return get()['WANTED']\n        except Exception: pass\n    return 7",
        "WANTED = 5\nclass P:\n    def __init__(self): self.x = 1\n    def get(self): return self.x\n"
        "assert f(P()) == WANTED",
    ),
    "a generator's frame": (
        "def f(g):\n    try: return g.gi_frame.f_globals['WANTED']\n    except Exception: return 7",
        "WANTED = 5\nassert f(x for x in [1]) == WANTED",
    ),
}

EXITS = {
    "exit": ("import sys\ndef f(x): sys.exit(0)", RAISES),
    "os._exit": ("import os\ndef f(x): os._exit(0)", LOOP),
    "os._exit where an error is wanted": ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept: pass\n"
        "else:\n    assert False"),
    "at exit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)", LOOP),
    "a thread that exits": (
        "import threading, time, os\nthreading.Timer(0.1, os._exit, (0,)).start()\ndef f(x): time.sleep(9)", LOOP),
    "a thread that floods": (
        "import threading, os\ndef spam():\n    while True:\n        for fd in range(3, 64):\n"
        "            try: os.write(fd, b'\"passed\"\\n')\n            except OSError: pass\n"
        "threading.Thread(target=spam, daemon=True).start()\ndef f(x): return 7",
        LOOP,
    ),
    "a fork": ("import os\ntry: os.fork()\nexcept OSError: pass\ndef f(x): return 7", LOOP),
    "closed files": ("import os\nos.closerange(0, 64)\ndef f(x): return 7", LOOP),
    "closed files, and an exit": ("import os\ndef f(x):\n    os.closerange(0, 64)\n    os._exit(0)", LOOP),
    "all files written": (FLOODS.format(data="b'\"passed\"\\n' * 9") + "def f(x): return 7", LOOP),
    "all files written, and an exit": (FLOODS.format(data="b'passed\\n' * 9") + "os._exit(0)", LOOP),
    "a signal": ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGTERM)", LOOP),
    "a signal to its parent": ("import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGTERM)", LOOP),
    "no memory": ("def f(x): return [0] * 10**10", "try:\n    f(1)\nexcept MemoryError: pass\nassert f(1) == 5"),
    "a recursion": ("def f(x): return f(x)", LOOP),
    "an endless generator": ("def f(x):\n    while True: yield x", "x = 1\nassert list(f(x))[:2] == [5, 5]"),
    "an endless length": (
        "class E:\n    def __len__(s): return 10**15\n    def __getitem__(s, i): return i\ndef f(x): return E()",
        "x = 1\nassert list(f(x)) == [5]",
    ),
    "standard input": ("import sys, io\nsys.stdin = io.StringIO('5')\ndef f(x): return sys.stdin.read()", LOOP),
    "a method replaced": (
        "def f(spy):\n    spy.saw = lambda x: True\n    spy.items = 5",
        "class Spy:\n    items = 0\n    def saw(self, x): return self.items == x\nspy = Spy()\n"
        "try:\n    f(spy)\nexcept AttributeError: pass\nassert spy.saw(7)",
    ),
    "an assertion caught": (
        "def f(g):\n    try: g(7)\n    except AssertionError: pass",
        "def g(x):\n    assert x == 5\nf(g)",
    ),
}  # fmt: skip

PEER = """
import gc, json, os
peer = next(o for o in gc.get_objects() if type(o).__name__ == 'Served')
send, receive = peer.send, peer.receive
def raw(data): os.write(peer._sink, len(data).to_bytes(4, 'big') + data)
def asks(what, *nodes):
    send(['?', 1, [], what, ['t', list(nodes)]])
    while (said := receive())[0] == '?': peer.answer(said)
    return said
"""


def sending(text: str) -> str:
    """A program whose answers to calls are made by ``said(number)``."""
    return f"{PEER}def said(n): {text}\ndef answered(m): said(m[1]) if m[0] == '=' else send(m)\n" + (
        "def f(*a):\n    peer.send = answered\n    return 7"
    )


ANSWERS = {
    "another number": (sending("send(['=', n + 1, 5, []])"), LOOP),
    "answers in advance": (sending("[send(['=', n + i, 7, []]) for i in range(9)]"), LOOP),
    "no JSON": (sending("raw(b'{]')"), LOOP),
    "no list": (sending("raw(b'5')"), LOOP),
    "no message": (sending("raw(b'[]')"), LOOP),
    "a huge one": (sending("os.write(peer._sink, b'\\xff' * 4 + b'x' * 99)"), LOOP),
    "half of one": (sending("os.write(peer._sink, b'\\0\\0\\0\\x0f[1')"), LOOP),
    "a deep one": (sending("raw(b'[' * 10**6)"), LOOP),
    "a deep value": (sending("raw(('[\"=\", %d, %s1%s, []]' % (n, '[\"t\", [' * 400, ']]' * 400)).encode())"), LOOP),
    "no value": (sending("send(['=', n, ['?'], []])"), LOOP),
    "a code object": (sending("send(['=', n, ['g', 'builtins', 'eval'], []])"), LOOP),
    "a class that is none": (sending("send(['!', n, 5, []])"), RAISES),
    "an object that was not shown": (sending("send(['=', n, ['y', 1], []])"), LOOP),
    "an error of no class": (
        sending("send(['!', n, ['x', [['os', 'system']], ['t', ['touch x']], '', None], []])"), LOOP),
    "a change of what was not given": (sending("send(['=', n, 7, [[-1, ['l', [5]]]]])"), LOOP),
    "a change of kind": (sending("send(['=', n, 7, [[0, ['d', []]]]])"), "x = [1]\nassert f(x) == 7 and x == [5]"),
    "a mute program": (sending("None"), LOOP),
    "a text's format": (
        PEER + "def f(g):\n    n = ['y', peer._foreign[id(g)]]\n"
        "    m = ['y', asks('get', '{0.__globals__[WANTED]}', 'format')[2][1]]\n"
        "    return asks('call', m, ['t', [n]], ['d', []])[2]",
        "WANTED = '5'\nassert f(lambda x: x) == WANTED",
    ),
    "a function's globals": (
        PEER + "def f(g):\n    said = asks('get', ['y', peer._foreign[id(g)]], '__globals__')\n"
        "    return 5 if 'WANTED' in str(said) else 7",
        "WANTED = 5\nassert f(lambda x: x) == WANTED",
    ),
    "a call of what was not shown": (
        PEER + "def f(g): return asks('call', ['g', 'builtins', 'object'], ['t', []], ['d', []])[2]",
        "assert f(lambda x: x) == 5",
    ),
    "an endless question": (PEER + "def f(g):\n    while True: asks('str', ['y', peer._foreign[id(g)]])", "f(lambda: 5)"
        "\nassert f(1) == 5"),
    "a codec of its own": (
        PEER + "import sys\nE = type(peer).answer.__globals__['Encoder']\nE.__call__ = lambda s, v, d=0: 5.0\n"
        "def f(*a): return 7", LOOP),
}  # fmt: skip

FORGED = {
    f"{kind}: {name}": case
    for kind, cases in {
        "shadowed": SHADOWED, "patched": PATCHED, "liars": LIARS, "spies": SPIES, "exits": EXITS,
        "answers": ANSWERS,
    }.items()
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), FORGED.values(), ids=FORGED.keys())
def test_a_program_that_knows_nothing_gets_nothing(program: str, tests: str) -> None:
    assert score(program, tests) == 0.0
