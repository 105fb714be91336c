"""Parquet data sets: every type of column, damaged files, blocks in bounded memory, orders that read each once."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax_core.errors import DataError
from relax_core.types import Audio, Image, Task, ToolCall, user
from relax_envs.data.blocks import BlockCache, shuffled
from relax_envs.data.columns import Columns
from relax_envs.data.parquet import ParquetRows
from relax_envs.data.source import Part
from relax_envs.data.tasks import DataTasks, Source
from relax_envs.single_turn import SingleTurn


def write(path: Path, table: Any, **settings: Any) -> Path:
    """A table, a list of rows or columns by name as a Parquet file."""
    if isinstance(table, list):
        table = pa.Table.from_pylist(table)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **settings)
    return path


def tasks_of(path: Path, columns: Columns | None = None, **settings: Any) -> DataTasks:
    source = Source(path=path, columns=columns, **settings)
    found = SingleTurn(SingleTurn.Config(data=source, need_answer=False)).tasks("train")
    assert isinstance(found, DataTasks)
    return found


def metadata(folder: Path, **columns: Any) -> dict[str, Any]:
    """The metadata of the first row of a file with more columns."""
    size = len(next(iter(columns.values())))
    found = tasks_of(write(folder / "data.parquet", {"prompt": ["?"] * size, **columns}))[0].metadata
    return dict(found)


# --- rows ---------------------------------------------------------------------------------------------------------


def test_rows(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "1 ?", "answer": "one", "level": 3},
        {"id": "b", "prompt": "2 ?", "answer": None, "level": None},
    ]
    path = write(tmp_path / "data.parquet", rows)
    tasks = tasks_of(path)
    assert list(tasks) == [Task("a", (user("1 ?"),), "one", {"level": 3}), Task("b", (user("2 ?"),))]
    assert tasks.where(1) == f"{path}:2" and tasks[-1] == tasks[1]


def test_messages_lose_the_nulls_that_arrow_fills_in(tmp_path: Path) -> None:
    calls = [
        {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"id": "c2", "function": {"name": "time", "arguments": {"zone": "CET"}}},
    ]
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": {"bytes": b"x"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "tool_calls": calls},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    tools = [
        {"name": "weather", "parameters": {"city": {"type": "string"}}},
        {"name": "time", "parameters": {"zone": {"type": "string"}}},
    ]
    [task] = tasks_of(write(tmp_path / "data.parquet", [{"messages": said, "tools": tools}]))
    assert task.messages[0] == user("a", Image(b"x"))
    assert task.messages[1].parts[1:] == (
        ToolCall("weather", {"city": "Oslo"}, "c1"),
        ToolCall("time", {"zone": "CET"}, "c2"),
    )
    assert task.metadata == {"tools": tools}


@pytest.mark.parametrize("kind", ["struct", "list", "binary", "large", "text"])
def test_images(kind: str, tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"x")
    (tmp_path / "c.png").write_bytes(b"x")
    raw, file = Image(b"\x89PNG"), Image(tmp_path / "b.png")
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pieces = {"bytes": b"\x89PNG", "path": None}, {"bytes": None, "path": "b.png"}
    columns: dict[str, Any] = {
        "struct": pa.array([*pieces, None], struct),
        "list": pa.array([[pieces[0]], [pieces[1]], []], pa.list_(struct)),
        "binary": pa.array([b"\x89PNG", b"\x89PNG", None], pa.binary()),
        "large": pa.array([[b"\x89PNG"], [b"\x89PNG"], None], pa.large_list(pa.large_binary())),
        "text": pa.array(["b.png", "b.png", None], pa.large_string()).dictionary_encode(),
    }
    prompts = ["<image>"] * 2 + ["none"]
    tasks = tasks_of(write(tmp_path / "data.parquet", {"prompt": prompts, "images": columns[kind]}))
    expected = {"struct": [raw, file], "list": [raw, file], "text": [file, file]}.get(kind, [raw, raw])
    assert [task.messages for task in tasks] == [*[(user(e),) for e in expected], (user("none"),)]
    assert all(task.metadata == {} for task in tasks)


def test_a_list_with_a_null_is_a_bad_row(tmp_path: Path) -> None:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([[{"bytes": b"x"}, None], [{"bytes": None, "path": None}], [{"bytes": b"x"}]], pa.list_(struct))
    path = write(tmp_path / "data.parquet", {"prompt": ["<image><image>", "<image>", "<image>"], "images": images})
    tasks = tasks_of(path)
    with pytest.raises(DataError, match=r"data\.parquet:1: image 2: null; a path is allowed"):
        tasks[0]
    with pytest.raises(DataError, match=r"data\.parquet:2: image: "):
        tasks[1]
    assert tasks[2].messages == (user(Image(b"x")),)


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(1),
        pa.array([None], pa.string()),
        pa.array([math.nan], pa.float64()),
        pa.array([None], pa.struct([("a", pa.int64())])),
        pa.array([None], pa.list_(pa.int64())),
        pa.array([None], pa.map_(pa.string(), pa.int64())),
        pa.array([None], pa.timestamp("ns")),
    ],
    ids=lambda column: str(column.type),
)
def test_null_and_nan_are_missing(column: Any, tmp_path: Path) -> None:
    for name in ("metadata", "images", "answer", "id", "tools", "system", "anything"):
        assert tasks_of(write(tmp_path / "data.parquet", {"prompt": ["?"], name: column}))[:] == [
            Task("1", (user("?"),))
        ]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([3], pa.uint8()), 3),
        (pa.array([True]), True),
        (pa.array([1.5], pa.float32()), 1.5),
        (pa.array([np.float16(1.5)], pa.float16()), 1.5),
        (pa.array(["x"], pa.large_string()), "x"),
        (pa.array(["x"], pa.string_view()), "x"),
        (pa.array(["x", "y", "x"]).dictionary_encode().slice(0, 1), "x"),
        (pa.array([["x", None]]), ["x", None]),
        (pa.array([[1, 2]], pa.list_(pa.int64(), 2)), [1, 2]),
        (pa.array([{"a": 1, "b": None, "c": {"d": None}}]), {"a": 1, "c": {}}),
        (pa.array([[("k", 1), ("l", 2)]], pa.map_(pa.string(), pa.int64())), {"k": 1, "l": 2}),
        (pa.array([Decimal("72.50")]), 72.5),
        (pa.array([Decimal("72")]), 72),
        (pa.array([datetime(2024, 5, 1, 12, 30)], pa.timestamp("us")), "2024-05-01T12:30:00"),
        (pa.array([datetime(2024, 5, 1, 12, 30)], pa.timestamp("ns")), "2024-05-01T12:30:00"),
        (pa.array([datetime(2024, 5, 1, tzinfo=UTC)]), "2024-05-01T00:00:00+00:00"),
        (pa.array([date(2024, 5, 1)]), "2024-05-01"),
        (pa.array([time(1, 2, 3)]), "01:02:03"),
        (pa.array([timedelta(seconds=90)]), 90.0),
    ],
    ids=lambda v: str(v.type) if isinstance(v, pa.Array) else "",
)
def test_values_become_plain_python(column: Any, expected: Any, tmp_path: Path) -> None:
    value = metadata(tmp_path, x=column)["x"]
    assert value == expected and type(value) is type(expected)
    answer = tasks_of(write(tmp_path / "data.parquet", {"prompt": ["?"], "answer": column}))[0].answer
    assert answer == expected and type(answer) is type(expected)


def test_bytes_are_no_metadata(tmp_path: Path) -> None:
    struct = pa.array([{"bytes": b"x", "path": "p"}])
    view = pa.array([b"x"], pa.binary_view())
    found = metadata(tmp_path, a=pa.array([b"x"]), b=struct, c=pa.array([[b"x"]]), d=view, e=pa.array([1]))
    assert found == {"e": 1}


def test_text_that_is_stored_as_bytes_is_a_bad_row(tmp_path: Path) -> None:
    tasks = tasks_of(write(tmp_path / "data.parquet", {"prompt": pa.array([b"?"])}))
    with pytest.raises(DataError, match=r"data\.parquet:1: 'prompt' is bytes; a list of messages is allowed"):
        tasks[0]


def test_text_that_is_not_utf8_spoils_its_own_row_alone(tmp_path: Path) -> None:
    text = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    tasks = tasks_of(write(tmp_path / "data.parquet", {"prompt": text}))
    assert [tasks[0].messages[0].text, tasks[2].messages[0].text] == ["good", "fine"]
    with pytest.raises(DataError, match=r"data\.parquet:2: 'utf-8' codec can't decode byte 0xff"):
        tasks[1]


def test_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", {"prompt": ["?"] * 4, "id": [7.0, None, 9.0, 7.0]})
    tasks = tasks_of(path)
    assert [tasks[i].id for i in range(3)] == ["7", "2", "9"] and tasks.bad_places == [3]
    with pytest.raises(DataError) as error:
        tasks[3]
    assert str(error.value) == f"{path}:4: id '7' was already used at {path}:1: make it unique"


def test_an_id_inside_of_an_object(tmp_path: Path) -> None:
    extra = [{"index": "x", "big": b"1"}, {"index": "y", "big": b"2"}]
    path = write(tmp_path / "data.parquet", {"prompt": ["?"] * 2, "extra": extra, "n": [1, 2]})
    assert [task.id for task in tasks_of(path, Columns(id="extra.index"))] == ["x", "y"]
    assert [task.id for task in tasks_of(path, Columns(id="{extra.index}-{n}"))] == ["x-1", "y-2"]


# --- files that cannot be used ------------------------------------------------------------------------------------


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [{"question": "?", "reward_model": {"ground_truth": "4", "style": "rule"}}])
    with pytest.raises(DataError) as error:
        tasks_of(path, Columns(prompt="qestion"))
    assert str(error.value) == (
        f"{path}: columns.prompt: no column 'qestion'; did you mean 'question'?; there are question, reward_model"
    )
    with pytest.raises(DataError, match=r"'reward_model' has no 'groundtruth'; did you mean 'ground_truth'\?"):
        tasks_of(path, Columns(prompt="question", answer="reward_model.groundtruth"))
    with pytest.raises(DataError, match=r"columns\.videos: no column 'vid'"):
        tasks_of(path, Columns(prompt="question", videos="v/{vid}.mp4"))
    assert tasks_of(path, Columns(prompt="question", answer="reward_model.ground_truth"))[0].answer == "4"


def test_an_empty_file(tmp_path: Path) -> None:
    schema = pa.schema([("prompt", pa.string())])
    empty = write(tmp_path / "empty.parquet", schema.empty_table())
    with pq.ParquetWriter(tmp_path / "groupless.parquet", schema):
        pass
    assert pq.read_metadata(tmp_path / "groupless.parquet").num_row_groups == 0
    for path in (empty, tmp_path / "groupless.parquet"):
        with pytest.raises(DataError, match=rf"{path.name}: the data set is empty$"):
            tasks_of(path)
    full = write(tmp_path / "zfull.parquet", {"prompt": ["a ?"]})
    found = tasks_of(tmp_path / "*.parquet")
    assert [task.messages[0].text for task in found] == ["a ?"] and found.where(0) == f"{full}:1"


def test_row_groups_without_rows(tmp_path: Path) -> None:
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "data.parquet", schema) as writer:
        for rows in ([], ["a"], [], ["b", "c"], []):
            writer.write_table(pa.table({"prompt": rows}, schema))
    tasks = tasks_of(tmp_path / "data.parquet")
    assert [task.messages[0].text for task in tasks] == ["a", "b", "c"]
    assert sorted(tasks.order(np.random.default_rng(0))) == [0, 1, 2]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", b"PAR1" + b"\0" * 40 + b"PAR1"])
def test_a_file_that_is_no_parquet(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"data\.parquet: not a readable Parquet file: "):
        tasks_of(tmp_path / "data.parquet")


def test_a_damaged_row_group_spoils_its_own_rows_alone(tmp_path: Path) -> None:
    prompts = [f"question number {i} ?" for i in range(100)]
    path = write(tmp_path / "data.parquet", {"prompt": prompts}, row_group_size=50, compression="snappy")
    chunk = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    begin = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    content[begin : begin + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(content)
    tasks = tasks_of(path)
    assert tasks[49].messages[0].text == prompts[49]
    for place in (50, 99):
        with pytest.raises(DataError, match=rf"data\.parquet:{place + 1}: "):
            tasks[place]
    with pytest.raises(DataError, match=r"data\.parquet: cannot be read"):
        tasks_of(path, Columns(id="prompt"))


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", {"prompt": ["a", "b"]})
    tasks = tasks_of(path)
    write(path, {"prompt": ["x", "y", "z"]})
    with pytest.raises(DataError, match=r"data\.parquet:1: .*the file has changed since it was opened"):
        tasks[0]


# --- blocks -------------------------------------------------------------------------------------------------------


def media_file(folder: Path, rows: int, group: int, nbytes: int = 2000, **settings: Any) -> Path:
    """Rows with random media, which nothing makes smaller."""
    rng = np.random.default_rng(0)
    images = [{"bytes": rng.bytes(nbytes), "path": None} for _ in range(rows)]
    audios = [{"bytes": rng.bytes(nbytes), "path": None} for _ in range(rows)]
    columns = {"q": [str(i) for i in range(rows)], "image": images, "audio": audios, "unused": audios}
    return write(folder / "media.parquet", columns, row_group_size=group, **settings)


MEDIA = Columns(prompt="<image><audio>{q}")


def cache_of(tasks: DataTasks) -> BlockCache:
    assert isinstance(tasks.data.rows, ParquetRows)
    return tasks.data.rows.cache


@pytest.mark.parametrize(
    ("rows", "group", "settings"),
    [
        (1000, 10, {}),
        (1000, 100, {}),
        (1003, 1003, {}),
        (1000, 300, {"write_batch_size": 4, "data_page_size": 10_000}),
        (1003, 1003, {"write_batch_size": 4, "data_page_size": 10_000}),
    ],
)
def test_an_order_reads_each_block_about_once(rows: int, group: int, settings: Any, tmp_path: Path) -> None:
    tasks = tasks_of(media_file(tmp_path, rows, group, **settings), MEDIA, cache_bytes=400_000)
    cache = cache_of(tasks)
    order = tasks.order(np.random.default_rng(1))
    assert sorted(order) == list(range(rows)) and order.dtype == np.int64
    assert (order == tasks.order(np.random.default_rng(1))).all() and (
        order != tasks.order(np.random.default_rng(2))
    ).any()
    blocks = sum(map(len, tasks.data.rows.runs()))
    assert blocks >= 9, "more than fit"
    most = 0
    for place in order:
        assert tasks[int(place)].messages[0].text == str(place)
        most = max(most, cache.nbytes)
    assert cache.reads <= blocks + 2
    assert most <= 400_000


def test_a_file_that_fits_is_shuffled_as_a_whole(tmp_path: Path) -> None:
    tasks = tasks_of(media_file(tmp_path, 400, 20), MEDIA, cache_bytes=4_000_000)
    order = tasks.order(np.random.default_rng(3))
    assert (order == np.random.default_rng(3).permutation(400)).all()
    for place in order:
        assert tasks[int(place)].messages[0].text == str(place)
    assert cache_of(tasks).reads == 20


def test_values_that_the_file_stores_once_count_in_memory(tmp_path: Path) -> None:
    same = "x" * 2000
    path = write(tmp_path / "data.parquet", {"prompt": ["?"] * 1000, "system": [same] * 1000})
    assert path.stat().st_size < 20_000
    tasks = tasks_of(path, cache_bytes=400_000)
    assert len(tasks.data.rows.runs()) > 1, "two million bytes are not read at once"
    for place in tasks.order(np.random.default_rng(0)):
        assert tasks[int(place)].id == str(place + 1)
        assert cache_of(tasks).nbytes <= 400_000


def test_parts_hold_whole_groups_or_pieces_of_them(tmp_path: Path) -> None:
    small = tasks_of(media_file(tmp_path, 100, 10), MEDIA, cache_bytes=400_000).data.rows.runs()
    assert [[part.size for part in run] for run in small] == [[10]] * 10
    large = tasks_of(media_file(tmp_path, 100, 100), MEDIA, cache_bytes=400_000).data.rows.runs()
    assert [[part.size for part in run] for run in large] == [[4] * 6, [4] * 6, [4] * 6, [4] * 7]
    assert [part.start for run in large for part in run] == list(range(0, 100, 4))
    huge = tasks_of(media_file(tmp_path, 10, 10), MEDIA, cache_bytes=1000).data.rows.runs()
    assert [part.size for run in huge for part in run] == [1] * 10, "a row is read even if it is larger than the cache"


def test_only_columns_with_a_use_are_read(tmp_path: Path) -> None:
    path = media_file(tmp_path, 100, 100)
    assert set(ParquetRows(path, BlockCache(10**6)).row(0)) == {"q", "image", "audio", "unused"}
    tasks = tasks_of(path, MEDIA)
    assert set(tasks.data.rows.row(0)) == {"q", "image", "audio"}
    assert set(tasks_of(path, Columns(prompt="q", images="", audios="")).data.rows.row(0)) == {"q"}
    whole = cache_of(tasks).nbytes
    assert 400_000 < whole < 450_000, "two of three columns of media"


def test_rows_far_apart_and_backwards(tmp_path: Path) -> None:
    tasks = tasks_of(media_file(tmp_path, 300, 300), MEDIA, cache_bytes=100_000)
    for place in (299, 0, 150, 149, 298, 7, *range(299, 200, -1)):
        task = tasks[place]
        assert task.messages[0].text == str(place)
        [image, audio] = task.messages[0].media()
        assert isinstance(image, Image) and isinstance(audio, Audio) and image.source != audio.source


def test_threads_share_the_reading_of_a_block(tmp_path: Path) -> None:
    tasks = tasks_of(media_file(tmp_path, 600, 100), MEDIA, cache_bytes=10**7)
    order = [int(place) for place in tasks.order(np.random.default_rng(0))]
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda place: tasks[place].messages[0].text, order))
    assert said == [str(place) for place in order]
    assert cache_of(tasks).reads == 6


def test_threads_go_on_in_one_stream(tmp_path: Path) -> None:
    path = media_file(tmp_path, 1000, 1000, write_batch_size=4, data_page_size=10_000)
    tasks = tasks_of(path, MEDIA, cache_bytes=400_000)
    order = [int(place) for place in tasks.order(np.random.default_rng(0))]
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda place: tasks[place].messages[0].text, order))
    assert said == [str(place) for place in order]
    blocks = sum(map(len, tasks.data.rows.runs()))
    assert cache_of(tasks).reads <= 2 * blocks


def test_a_block_is_read_once_for_all_who_wait() -> None:
    cache = BlockCache(100)
    begun, go_on = threading.Event(), threading.Event()

    def read() -> Any:
        begun.set()
        assert go_on.wait(10)
        return np.zeros(10, np.uint8)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", read)
        assert begun.wait(10)
        second = pool.submit(cache.get, "a", lambda: pytest.fail("read twice"))
        go_on.set()
        assert first.result(10) is second.result(10)
    assert (cache.reads, cache.nbytes) == (1, 10)


def test_the_blocks_used_last_are_kept() -> None:
    cache = BlockCache(100)
    blocks = {name: np.zeros(size, np.uint8) for name, size in (("a", 40), ("b", 40), ("c", 40), ("d", 500))}
    for name in ("a", "b", "a", "c"):
        assert cache.get(name, lambda name=name: blocks[name]) is blocks[name]  # type: ignore[misc]
    assert [cache.peek(name) is not None for name in "abc"] == [True, False, True] and cache.nbytes == 80
    cache.get("d", lambda: blocks["d"])
    assert cache.peek("d") is not None and cache.nbytes == 500, "one is kept whatever its size"


def test_an_error_of_reading_is_not_kept() -> None:
    cache = BlockCache(100)

    def fails() -> Any:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        cache.get("a", fails)
    assert cache.get("a", lambda: np.zeros(1, np.uint8)) is not None


def test_windows_mix_parts_of_several_runs() -> None:
    runs = [[Part(100 * r + 10 * p, 10, 10) for p in range(10)] for r in range(10)]
    order = shuffled(1000, runs, np.random.default_rng(0), 160)
    assert sorted(order) == list(range(1000))
    for window in order[:640].reshape(-1, 80):
        parts = {int(row) // 10 for row in window}
        assert len(parts) == 8 and len({part // 10 for part in parts}) == 4, "eight parts of four runs"


def test_runs_that_hold_much_are_read_one_after_the_other() -> None:
    runs = [[Part(100 * r + 10 * p, 10, 10, held=90) for p in range(10)] for r in range(4)]
    order = shuffled(400, runs, np.random.default_rng(0), 160)
    seen = [int(row) // 100 for row in order]
    assert sorted(order) == list(range(400))
    assert len([i for i in range(1, 400) if seen[i] != seen[i - 1]]) == 3


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_stays_flat(tmp_path: Path) -> None:
    """Four hundred megabytes of media through a cache of sixteen, shuffled."""
    rng = np.random.default_rng(0)
    pool = [rng.bytes(100_000) for _ in range(50)]
    path = tmp_path / "media.parquet"
    with pq.ParquetWriter(path, pa.schema([("prompt", pa.string()), ("images", pa.binary())])) as writer:
        for i in range(0, 4000, 20):
            images = [rng.bytes(8) + pool[int(rng.integers(50))] for _ in range(20)]
            writer.write_table(pa.table({"prompt": [f"<image>{i + j}" for j in range(20)], "images": images}))
    code = """
import sys
import numpy as np
from pathlib import Path
from relax_envs.data.tasks import Source
from relax_envs.single_turn import SingleTurn
def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1000
source = Source(path=Path(sys.argv[1]), cache_bytes=16_000_000)
tasks = SingleTurn(SingleTurn.Config(data=source, need_answer=False)).tasks("train")
found = []
for n, place in enumerate(tasks.order(np.random.default_rng(0))):
    tasks[int(place)]
    if n in (1000, 3999):
        found.append(held())
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    early, late = map(float, done.stdout.split())
    assert late < early + 30 and late < 400, (early, late)
