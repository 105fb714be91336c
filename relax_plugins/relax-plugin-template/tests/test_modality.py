from __future__ import annotations

from pathlib import Path

from relax_core.testing import check_modality

from relax_plugin_template.modality import PortablePixmap


def test_it_keeps_the_promises_of_a_modality(tmp_path: Path) -> None:
    """Good files of every form that it reads, and an empty folder for the check."""
    picture, scratch = tmp_path / "picture.ppm", tmp_path / "scratch"
    picture.write_bytes(b"P6\n3 2\n255\n" + bytes(range(18)))
    scratch.mkdir()
    check_modality(PortablePixmap(PortablePixmap.Config()), [picture], scratch)
