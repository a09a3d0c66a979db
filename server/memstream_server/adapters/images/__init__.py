"""Images in a folder of the data directory.

layout: the bytes of an image
folder: the files: written and removed by one thread, bounded in bytes
"""

from memstream_server.adapters.images.folder import FolderImages

__all__ = ["FolderImages"]
