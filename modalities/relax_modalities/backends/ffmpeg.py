"""What the backends on PyAV share: opening media files, and nothing else that FFmpeg would open."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import av
from av.codec.context import CodecContext
from av.container import InputContainer
from av.stream import Discard, Disposition, Stream
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from relax_modalities.decoder import Source, broken, too_large
from relax_modalities.forms import form_of

_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,asf,rm,mxf,dv,mpegts,mpeg,mpegvideo,m4v,h264,hevc,ivf,obu,"
    "yuv4mpegpipe,gif,apng,wav,w64,aiff,au,caf,voc,flac,ogg,mp3,aac,ac3,eac3,amr,amrnb,amrwb,tta,wv,ape"
)
"""Files that hold media themselves. FFmpeg also knows lists of other files and addresses, scripts, devices, subtitles:
what a row names must not make it read those."""

S = TypeVar("S", bound=Stream)


@contextmanager
def open_media(source: Source, **options: str) -> Iterator[InputContainer]:
    """An open container, closed at the end. Raises av.FFmpegError for what is not one of the known formats."""
    form = form_of(source)
    if form and form.kind == "image" and form.id not in ("gif", "png"):
        raise ValueError(f"{form.text}, which other backends read")
    # The prefix keeps a colon in a path from being taken for the end of a protocol's name.
    content = io.BytesIO(source) if isinstance(source, bytes) else f"file:{source}"
    settings = {"format_whitelist": _FORMATS, **options}
    with av.open(content, "r", options=settings, metadata_errors="replace") as container:
        yield container


@contextmanager
def open_video(source: Source, max_pixels: int) -> Iterator[tuple[InputContainer, VideoStream]]:
    """An open container and its default video stream. Raises DataError for one without, and for too large a picture."""
    with open_media(source, max_pixels=str(max_pixels + 1)) as container:
        moving = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not moving:
            raise broken("video", source, "pyav", "holds no video stream: give a file with moving pictures")
        stream = only(container, moving)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > max_pixels:
            raise too_large("video", source, width, height, max_pixels)
        yield container, stream


def decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Frames from where the container is. FFmpeg's own decoders of VP8 and VP9 leave transparency out; not libvpx."""
    if not has_hidden_alpha(stream):
        yield from container.decode(stream)
        return
    name = {"vp8": "libvpx", "vp9": "libvpx-vp9"}[stream.codec_context.name]
    decoder = cast(VideoCodecContext, CodecContext.create(name, "r"))
    for packet in container.demux(stream):
        yield from decoder.decode(packet)


def has_hidden_alpha(stream: VideoStream) -> bool:
    """Whether transparency travels beside the pictures, where the pixel format does not show it."""
    return stream.metadata.get("alpha_mode") == "1" and stream.codec_context.name in ("vp8", "vp9")


def only(container: InputContainer, streams: Sequence[S]) -> S:
    """The default stream of these, or the first: the only one that is then read. It is decoded by one thread.

    Decoding is spread over media, not inside one.
    """
    chosen = next((s for s in streams if s.disposition & Disposition.default), streams[0])
    for stream in container.streams:
        if stream is not chosen:
            stream.discard = Discard.all
    if chosen.codec_context is None:
        raise ValueError("its codec is not known")
    chosen.codec_context.thread_count = 1
    return chosen
