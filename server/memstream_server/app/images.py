"""Opens the images of a server's memories."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import shutil
from collections.abc import AsyncIterator

import structlog

from memstream_server.adapters.images import FolderImages
from memstream_server.observability import Metrics
from memstream_server.ports.images import IMAGE_FOLDER, NO_IMAGES, Images
from memstream_server.settings import Settings

log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def open_images(settings: Settings, metrics: Metrics) -> AsyncIterator[Images]:
    """Those in the data directory; none if the settings allow none or another server has the folder."""
    from memstream_server.rpc.info import server_version

    folder = settings.data_dir / IMAGE_FOLDER
    if not settings.images_bytes_max:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        yield NO_IMAGES
        return
    images = FolderImages(
        folder,
        f"memstream {server_version()} on Python {platform.python_version()}",
        settings.images_bytes_max,
        settings.disk_free_min_bytes,
        lambda outcome: metrics.image_reads.labels(outcome).inc(),
    )
    try:
        try:
            await images.open()
        except OSError as error:  # a cache keeps no server from starting
            log.warning("images_not_usable", folder=folder, error=error)
            yield NO_IMAGES
            return
        metrics.image_bytes.set_function(lambda: images.size_bytes)
        yield images
    finally:
        await images.close()
