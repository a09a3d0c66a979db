"""Images in a folder of the data directory.

folder: the files and their bytes: written and removed by one thread, bounded in size
"""

from memstream_server.adapters.images.folder import FolderImages

__all__ = ["FolderImages"]
