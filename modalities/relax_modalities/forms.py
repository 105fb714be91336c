"""What a file is by its first bytes, whatever its name says: for errors that help, and to choose who reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from relax_core.types import MediaKind

_HEAD = 1024
"""Bytes that are looked at."""


@dataclass(frozen=True, slots=True)
class Form:
    """``id``: a short name; ``text``: as an error says it; ``kind``: of medium, or None; ``todo``: what helps."""

    id: str
    text: str
    kind: MediaKind | None = None
    todo: str = ""


_CONVERT = "convert it to PNG or JPEG"
_AGAIN = "download it again"

_BY_BRAND = (
    ("avif", Form("avif", "an AVIF image", "image")),
    ("avis", Form("avif", "an AVIF image", "image")),
    ("hei", Form("heic", "a HEIC image", "image", _CONVERT)),
    ("hev", Form("heic", "a HEIC image", "image", _CONVERT)),
    ("mif1", Form("heic", "a HEIF image", "image", _CONVERT)),
    ("msf1", Form("heic", "a HEIF image", "image", _CONVERT)),
    ("M4A", Form("mp4", "an MPEG-4 sound", "audio")),
    ("M4B", Form("mp4", "an MPEG-4 sound", "audio")),
)
"""Files of boxes, by the brand that they begin with; any other is MP4 or QuickTime."""

_MP4 = Form("mp4", "an MP4 or QuickTime file", "video")

_FORMS: tuple[tuple[str, Form], ...] = (
    (r"\x89PNG\r\n\x1a\n", Form("png", "a PNG image", "image")),
    (r"\xff\xd8\xff", Form("jpeg", "a JPEG image", "image")),
    (r"GIF8[79]a", Form("gif", "a GIF image", "image")),
    (r"RIFF....WEBP", Form("webp", "a WebP image", "image")),
    (r"BM....\0\0\0\0", Form("bmp", "a BMP image", "image")),
    (r"II\*\0|MM\0\*|II\+\0|MM\0\+", Form("tiff", "a TIFF image", "image")),
    (r"\0\0\0\x0cJXL |\xff\x0a", Form("jxl", "a JPEG XL image", "image", _CONVERT)),
    (r"\0\0\0\x0cjP  |\xff\x4f\xff\x51", Form("jp2", "a JPEG 2000 image", "image")),
    (r"8BPS", Form("psd", "a Photoshop file", "image", _CONVERT)),
    (r"%!PS|\xc5\xd0\xd3\xc6", Form("eps", "a PostScript file", "image", _CONVERT)),
    (r"(?:RIFF|RIFX|RF64|BW64)....WAVE", Form("wav", "a WAV sound", "audio")),
    (r"riff\x2e\x91\xcf\x11", Form("w64", "a Wave64 sound", "audio")),
    (r"FORM....AIF[FC]", Form("aiff", "an AIFF sound", "audio")),
    (r"\.snd", Form("au", "an AU sound", "audio")),
    (r"caff", Form("caf", "a CAF sound", "audio")),
    (r"Creative Voice File", Form("voc", "a VOC sound", "audio")),
    (r"NIST_1A\n", Form("nist", "a SPHERE sound", "audio")),
    (r"fLaC", Form("flac", "a FLAC sound", "audio")),
    (r"#!AMR", Form("amr", "an AMR sound", "audio")),
    (r"ID3", Form("mp3", "an MP3 sound", "audio")),  # also in front of other streams of frames
    (r"\xff[\xf0\xf1\xf8\xf9]", Form("adts", "an AAC sound", "audio")),
    (r"\xff[\xe2-\xe5\xf2-\xf5\xfa-\xfd]", Form("mp3", "an MP3 sound", "audio")),
    (r"\x0b\x77", Form("ac3", "an AC-3 sound", "audio")),
    (r"MThd", Form("midi", "a MIDI file", None, "render it to WAV")),
    (r"OggS", Form("ogg", "an Ogg file", "audio")),
    (r"\x1a\x45\xdf\xa3", Form("matroska", "a Matroska or WebM file", "video")),
    (r"RIFF....AVI[ X]", Form("avi", "an AVI file", "video")),
    (r"FLV\x01", Form("flv", "a Flash video", "video")),
    (r"\x30\x26\xb2\x75\x8e\x66\xcf\x11", Form("asf", "a Windows Media file", "video")),
    (r"\x47.{187}\x47", Form("mpegts", "an MPEG transport stream", "video")),
    (r"\0\0\x01[\xba\xb3]", Form("mpeg", "an MPEG stream", "video")),
    (r"version https://git-lfs", Form("lfs", "a Git LFS pointer, not the file itself", None, "run git lfs pull")),
    (r"#EXTM3U|ffconcat ", Form("playlist", "a list of other files", None, "give the media file itself")),
    (r"%PDF-", Form("pdf", "a PDF document", None, "render its pages to PNG")),
    (r"PK\x03\x04", Form("zip", "a ZIP archive", None, "unpack it")),
    (r"\x1f\x8b", Form("gzip", "a gzip file", None, "unpack it")),
    (r"\0{64}", Form("zeros", "zero bytes", None, _AGAIN)),
)
"""Patterns of a file's beginning, tried in this order."""

_TEXTS: tuple[tuple[str, Form], ...] = (
    (r"(?:<\?xml|<!--|<!doctype svg|<svg).*<svg|<svg", Form("svg", "an SVG drawing", "image", "render it to PNG")),
    (r"<!doctype html|<html|<head|<body", Form("html", "an HTML page", None, _AGAIN)),
    (r"<\?xml|<error", Form("xml", "an XML document", None, _AGAIN)),
    (r"[\[{][\s\"\[{]", Form("json", "a JSON text", None, _AGAIN)),
)
"""Likewise for text, after blanks and in small letters."""


def looks_like(source: Path | bytes, kind: MediaKind) -> bool:
    """Whether content begins like one of a kind. Sounds also come in containers of videos."""
    form = form_of(source)
    return form is not None and form.kind == kind


def form_of(source: Path | bytes) -> Form | None:
    """What the content looks like; None if it looks like nothing known, or cannot be read."""
    if isinstance(source, bytes):
        return form_of_head(source[:_HEAD])
    try:
        with source.open("rb") as file:
            return form_of_head(file.read(_HEAD))
    except OSError:
        return None


def form_of_head(head: bytes) -> Form | None:
    """What content that begins like this is."""
    if head[4:8] == b"ftyp":
        brand = head[8:12].decode("latin-1")
        return next((form for name, form in _BY_BRAND if brand.startswith(name)), _MP4)
    if head[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip", b"moof", b"styp"):
        return _MP4
    text = head.decode("latin-1")
    for pattern, form in _FORMS:
        if re.match(pattern, text, re.DOTALL):
            return form
    text = text.removeprefix("\xef\xbb\xbf").lstrip().lower()
    return next((form for pattern, form in _TEXTS if re.match(pattern, text, re.DOTALL)), None)


def advice(form: Form | None, kind: MediaKind) -> str:
    """What an error adds about content that no backend for ``kind`` could read; empty where nothing is known."""
    if form is None:
        return ""
    todo = form.todo or (f"give it as {form.kind}" if form.kind not in (None, kind) else "")
    return f": it is {form.text}" + (f", {todo}" if todo else "")
