"""The media store: once decoded, once made, counted references, least recently used out first."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Modality
from relax_core.media import MediaStore
from relax_core.types import Audio, Decoded, Image, MediaKind


class Grey(Modality):
    """Reads each byte as a grey pixel, and counts how often it does."""

    kind: ClassVar[MediaKind] = "image"

    def __init__(self) -> None:
        super().__init__(ComponentConfig())
        self.calls = 0
        self.delay = 0.0

    def decode(self, source: Path | bytes) -> Decoded:
        self.calls += 1
        time.sleep(self.delay)
        content = source if isinstance(source, bytes) else source.read_bytes()
        if content == b"bad":
            raise ZeroDivisionError("odd\nbytes")
        return Decoded("image", np.frombuffer(content, np.uint8).reshape(1, -1, 1).repeat(3, axis=2))

    def dump(self, decoded: Decoded) -> tuple[str, bytes]:
        return ".raw", decoded.data[:, :, 0].tobytes()

    def restore(self, content: bytes) -> Decoded:
        return self.decode(content)


def store(max_bytes: int = 10**6) -> tuple[MediaStore, Grey]:
    grey = Grey()
    return MediaStore({"image": grey}, max_bytes), grey


def features(size: int) -> dict[str, np.ndarray]:
    return {"pixels": np.zeros(size, np.uint8)}


def test_each_source_is_decoded_once(tmp_path: Path) -> None:
    media, grey = store()
    path = tmp_path / "a.raw"
    path.write_bytes(b"abc")
    first = media.decode(Image(path))
    assert media.decode(Image(path)) is first
    assert media.decode(Image(b"abc")).hash == first.hash
    assert media.decode(Image(b"abc")).hash == first.hash
    assert grey.calls == 2, "once for the file, once for the bytes"


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    media, _ = store()
    path = tmp_path / "a.raw"
    path.write_bytes(b"abc")
    before = media.decode(Image(path))
    path.write_bytes(b"abcd")
    assert media.decode(Image(path)).hash != before.hash


def test_decoded_content_passes_through_and_its_kind_must_fit() -> None:
    media, grey = store()
    decoded = grey.decode(b"abc")
    assert media.decode(Image(decoded)) is decoded
    with pytest.raises(DataError, match="audio: got decoded image"):
        media.decode(Audio(decoded))
    assert media.nbytes == 0


def test_what_cannot_be_decoded_is_a_data_error(tmp_path: Path) -> None:
    media, grey = store()
    with pytest.raises(DataError, match=r"nowhere\.raw: No such file"):
        media.decode(Image(tmp_path / "nowhere.raw"))
    with pytest.raises(DataError, match=r"no modality decodes audio \(there are: image\)"):
        media.decode(Audio(b"abc"))
    path = tmp_path / "bad.raw"
    path.write_bytes(b"bad")
    for _ in range(2):
        with pytest.raises(DataError, match=r"image .*bad\.raw: ZeroDivisionError: odd bytes"):
            media.decode(Image(path))
    assert grey.calls == 2, "a failure is not kept"


def test_threads_share_one_decoding() -> None:
    media, grey = store()
    grey.delay = 0.05
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        found.append(media.decode(Image(b"abc")))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grey.calls == 1
    assert len(found) == 8 and all(one is found[0] for one in found)


def test_threads_share_one_failure() -> None:
    media, grey = store()
    grey.delay = 0.05
    start, errors = threading.Barrier(4), []

    def ask() -> None:
        start.wait()
        try:
            media.decode(Image(b"bad"))
        except DataError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and grey.calls == 1


def test_features_are_made_once_and_may_decode_meanwhile() -> None:
    media, grey = store()
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"pixels": media.decode(Image(b"abc")).data}

    assert media.features("k", make) == "k"
    assert media.features("k", make) == "k"
    assert made == [1] and grey.calls == 1
    assert media.get("k")["pixels"].shape == (1, 3, 3)
    assert "k" in media and "other" not in media


def test_missing_features_are_a_data_error() -> None:
    media, _ = store()
    with pytest.raises(DataError, match="media k: not in the store"):
        media.get("k")


def test_put_keeps_what_is_there() -> None:
    media, _ = store()
    media.put("k", features(3))
    media.put("k", features(5))
    assert media.get("k")["pixels"].nbytes == media.nbytes == 3


def test_least_recently_used_goes_first_and_held_stays() -> None:
    media, _ = store(max_bytes=100)
    for key in "abc":
        media.put(key, features(30))
    media.retain(["b"])
    media.get("a")
    media.put("d", features(30))
    assert [key for key in "abcd" if key in media] == ["a", "b", "d"], "c was used least recently of those not held"
    media.put("e", features(30))
    assert [key for key in "abcde" if key in media] == ["b", "d", "e"]
    assert media.nbytes == 90


def test_held_features_may_exceed_the_bound_until_released() -> None:
    media, _ = store(max_bytes=50)
    for key in "abc":
        media.put(key, features(30))
        media.retain([key])
    assert media.nbytes == 90
    media.release(["a", "b"])
    assert [key for key in "abc" if key in media] == ["c"]
    assert media.nbytes == 30


def test_what_was_just_made_stays_even_when_it_is_too_big() -> None:
    media, _ = store(max_bytes=10)
    media.put("a", features(30))
    assert "a" in media
    media.put("b", features(30))
    assert "a" not in media and "b" in media


def test_references_are_counted() -> None:
    media, _ = store(max_bytes=10)
    media.put("a", features(30))
    media.retain(["a", "a"])
    media.retain(["a"])
    media.release(["a", "a"])
    media.put("b", features(1))
    assert "a" in media
    media.release(["a"])
    assert "a" not in media


def test_retain_and_release_do_all_or_nothing() -> None:
    media, _ = store(max_bytes=10)
    media.put("a", features(30))
    with pytest.raises(DataError, match="media gone: not in the store"):
        media.retain(["a", "gone"])
    with pytest.raises(DataError, match="held 0 times, to be released 1"):
        media.release(["a"])
    media.put("b", features(1))
    assert "a" not in media, "the failed retain left no reference behind"


# --- holding ----------------------------------------------------------------------------------------------------------


def test_what_is_asked_for_inside_of_holding_stays_until_its_end() -> None:
    media, _ = store(max_bytes=10)
    with media.holding():
        for name in "abc":
            media.features(name, lambda: features(8))
        assert media.nbytes == media.size("abc") == media.size("aabbcc") == 24
        media.retain("b")
    assert "b" in media and media.nbytes <= 16
    media.release("b")
    assert media.nbytes <= 10 and media.size("xyz") == 0


def test_holding_is_a_matter_of_one_thread_and_may_be_nested() -> None:
    media, _ = store(max_bytes=0)
    with media.holding():
        media.features("outer", lambda: features(4))
        with media.holding():
            media.features("inner", lambda: features(4))
        other = threading.Thread(target=lambda: media.features("other", lambda: features(4)))
        other.start()
        other.join()
        media.features("last", lambda: features(4))  # makes room, were there something to push out
        assert "outer" in media and "last" in media and "other" not in media
    assert media.nbytes <= 4


def test_threads_that_share_one_making_all_hold_it() -> None:
    """The one that made it may be done with it, and it pushed out, before the others wake up."""
    media, _ = store(max_bytes=0)
    wrong: list[BaseException] = []

    def use(n: int) -> None:
        try:
            for i in range(200):
                with media.holding():
                    media.features(str(i % 3), lambda: features(16))
                    media.retain([str(i % 3)])
                assert media.get(str(i % 3))["pixels"].nbytes == 16
                media.release([str(i % 3)])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not wrong and media.nbytes <= 16
