"""Claude's memory tool on a memstream server: a file below /memories is a block of a memory."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memstream.blocks import Block
from memstream.client import Client
from memstream.errors import BlockNotFound, EtagMismatch, Exhausted, InvalidRequest, MemoryNotFound
from memstream.frameworks import AnyClient, asynchronous, framework
from memstream.names import memory_name, user_id_of
from memstream.sync.loop import LOOP

with framework("anthropic"):
    from anthropic.lib.tools import BetaAbstractMemoryTool, BetaAsyncAbstractMemoryTool, ToolError

ROOT = "/memories"
ATTEMPTS_MAX = 10
"""Of an edit while others edit the same file."""
_SIZES = "BKMG"
_WIDTH = 6


class _Files:
    """The files of a memory, and what the commands of the tool answer: the words of the SDK's own tool for a folder."""

    def __init__(self, client: AnyClient, memory: str) -> None:
        self._client: Client = asynchronous(client)
        self._memory = memory
        self._blocks = self._client.memory(memory).blocks

    async def view(self, command: Any) -> str:
        """Shows a file with line numbers, or what a folder has."""
        path = _checked_path(command.path)
        files = await self._read_all()
        if path in files:
            return _show_text(command, files[path].text)
        inside = {name: block for name, block in files.items() if _is_inside(name, path)}
        if path and not inside:
            raise ToolError(f"The path {command.path} does not exist. Please provide a valid path.")
        sizes: dict[str, int] = {}
        for name, block in inside.items():
            parts = name.removeprefix(path).strip("/").split("/")
            size = len(block.text.encode())
            for depth in range(1, min(len(parts), 2) + 1):
                shown = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
                if not any(part.startswith(".") for part in parts[:depth]):
                    sizes[shown] = sizes.get(shown, 0) + size
        shown_path = command.path.rstrip("/")
        total = sum(len(block.text.encode()) for block in inside.values())
        lines = [f"{_format_size(total)}\t{command.path}"]
        lines += [f"{_format_size(sizes[name])}\t{shown_path}/{name}" for name in sorted(sizes)]
        title = f"Here're the files and directories up to 2 levels deep in {command.path}, excluding hidden items:"
        return "\n".join([title, *lines])

    async def create(self, command: Any) -> str:
        """Creates a file."""
        path = _checked_path(command.path)
        files = await self._read_all()
        if not path or path in files or any(_is_inside(name, path) or _is_inside(path, name) for name in files):
            raise ToolError(f"File {command.path} already exists")
        await self._put(path, command.file_text, command.path)
        return f"File created successfully at: {command.path}"

    async def str_replace(self, command: Any) -> str:
        """Replaces a text that occurs once."""
        old, new = command.old_str, command.new_str

        def edit(text: str) -> str:
            count = text.count(old) if old else 0
            if count == 0:
                raise ToolError(
                    f"No replacement was performed, old_str `{old}` did not appear verbatim in {command.path}."
                )
            if count > 1:
                places = [text[:place].count("\n") + 1 for place in range(len(text)) if text.startswith(old, place)]
                lines = ", ".join(map(str, places))
                raise ToolError(
                    f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines: {lines}. "
                    "Please ensure it is unique"
                )
            return text.replace(old, new)

        before, after = await self._edit(command.path, edit)
        at = before[: before.find(old)].count("\n")
        shown = _number_lines(after.split("\n")[max(0, at - 2) : at + 3], max(0, at - 2) + 1)
        return f"The memory file has been edited. Here is the snippet showing the change (with line numbers):\n{shown}"

    async def insert(self, command: Any) -> str:
        """Inserts lines after a line."""

        def edit(text: str) -> str:
            lines = text.removesuffix("\n").split("\n") if text else []
            if not 0 <= command.insert_line <= len(lines):
                raise ToolError(
                    f"Invalid `insert_line` parameter: {command.insert_line}. "
                    f"It should be within the range [0, {len(lines)}]."
                )
            lines.insert(command.insert_line, command.insert_text.rstrip("\n"))
            return "\n".join(lines) + "\n"

        await self._edit(command.path, edit)
        return f"The file {command.path} has been edited."

    async def delete(self, command: Any) -> str:
        """Deletes a file or folder."""
        path = _checked_path(command.path)
        if not path:
            raise ToolError("Cannot delete the /memories directory itself")
        gone = [name for name in await self._read_all() if name == path or _is_inside(name, path)]
        if not gone:
            raise ToolError(f"The path {command.path} does not exist")
        for name in gone:
            await self._blocks.delete(memory_name(name))
        return f"Successfully deleted {command.path}"

    async def rename(self, command: Any) -> str:
        """Renames a file or folder."""
        old, new = _checked_path(command.old_path), _checked_path(command.new_path)
        if not old:
            raise ToolError("Cannot rename the /memories directory itself")
        files = await self._read_all()
        moved = {name: block for name, block in files.items() if name == old or _is_inside(name, old)}
        if not moved:
            raise ToolError(f"The path {command.old_path} does not exist")
        if not new or any(name == new or _is_inside(name, new) for name in files):
            raise ToolError(f"The destination {command.new_path} already exists")
        for name, block in moved.items():  # the new one first: a crash loses nothing
            await self._put(new + name[len(old) :], block.text, command.new_path)
            await self._blocks.delete(memory_name(name), etag=block.etag)
        return f"Successfully renamed {command.old_path} to {command.new_path}"

    async def clear_all_memory(self) -> str:
        """Deletes all files."""
        for name in await self._read_all():
            await self._blocks.delete(memory_name(name))
        return "All memory cleared"

    async def _read_all(self) -> dict[str, Block]:
        """The blocks by path below /memories."""
        try:
            return {user_id_of(block.name): block async for block in self._blocks.list()}
        except MemoryNotFound:
            return {}

    async def _put(self, path: str, text: str, shown: str) -> None:
        with _refused_to_the_model():
            try:
                await self._blocks.put(memory_name(path), text, absent=True)
            except MemoryNotFound:
                await self._client.create_memory(self._memory, exist_ok=True)
                await self._blocks.put(memory_name(path), text, absent=True)
            except EtagMismatch:
                raise ToolError(f"File {shown} already exists") from None

    async def _edit(self, shown: str, edit: Any) -> tuple[str, str]:
        """Replaces the text of a file by what `edit` returns for it; returns both texts."""
        path = _checked_path(shown)
        for _ in range(ATTEMPTS_MAX):
            files = await self._read_all()
            if path not in files:
                is_folder = not path or any(_is_inside(name, path) for name in files)
                problem = "is not a file." if is_folder else "does not exist. Please provide a valid path."
                raise ToolError(f"The path {shown} {problem}")
            after = edit(files[path].text)
            with _refused_to_the_model():
                try:
                    await self._blocks.put(memory_name(path), after, etag=files[path].etag)
                except (BlockNotFound, EtagMismatch):  # changed since it was read
                    continue
                return files[path].text, after
        raise ToolError(f"The file {shown} is being changed by others. Try again.")


class MemstreamMemoryTool(BetaAbstractMemoryTool):
    """The memory tool of `Anthropic().beta.messages.tool_runner(tools=[...])`.

    client: a blocking client. memory: "namespace/name", created with the first file; its blocks are the files. What the
    model asks for and cannot have is a ToolError, which the model reads; other failures are a MemstreamError.
    """

    def __init__(self, client: AnyClient, memory: str, **options: Any) -> None:
        super().__init__(**options)
        self._files = _Files(client, memory)

    def view(self, command: Any) -> str:
        """Shows a file with line numbers, or what a folder has."""
        return LOOP.run(self._files.view(command))

    def create(self, command: Any) -> str:
        """Creates a file."""
        return LOOP.run(self._files.create(command))

    def str_replace(self, command: Any) -> str:
        """Replaces a text that occurs once."""
        return LOOP.run(self._files.str_replace(command))

    def insert(self, command: Any) -> str:
        """Inserts lines after a line."""
        return LOOP.run(self._files.insert(command))

    def delete(self, command: Any) -> str:
        """Deletes a file or folder."""
        return LOOP.run(self._files.delete(command))

    def rename(self, command: Any) -> str:
        """Renames a file or folder."""
        return LOOP.run(self._files.rename(command))

    def clear_all_memory(self) -> str:
        """Deletes all files."""
        return LOOP.run(self._files.clear_all_memory())


class AsyncMemstreamMemoryTool(_Files, BetaAsyncAbstractMemoryTool):
    """The same for `AsyncAnthropic()`."""

    def __init__(self, client: AnyClient, memory: str, **options: Any) -> None:
        _Files.__init__(self, client, memory)
        BetaAsyncAbstractMemoryTool.__init__(self, **options)


@contextmanager
def _refused_to_the_model() -> Iterator[None]:
    """What the server refuses (a text or name that is too long, too many files) is a ToolError."""
    try:
        yield
    except (Exhausted, InvalidRequest) as error:
        raise ToolError(str(error)) from error


def _checked_path(path: str) -> str:
    """The path below /memories; empty for that itself. Raises ToolError."""
    if path != ROOT and not path.startswith(f"{ROOT}/"):
        raise ToolError(f"Path must start with {ROOT}, got: {path}")
    found = posixpath.normpath(path)
    if found != ROOT and not found.startswith(f"{ROOT}/"):
        raise ToolError(f"Path {path} would escape {ROOT} directory")
    return found.removeprefix(ROOT).strip("/")


def _is_inside(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def _show_text(command: Any, text: str) -> str:
    lines, first = text.split("\n"), 1
    if command.view_range and len(command.view_range) == 2:
        first = max(1, command.view_range[0])
        last = len(lines) if command.view_range[1] == -1 else command.view_range[1]
        lines = lines[first - 1 : last]
    return f"Here's the content of {command.path} with line numbers:\n{_number_lines(lines, first)}"


def _number_lines(lines: list[str], first: int) -> str:
    return "\n".join(f"{number:>{_WIDTH}}\t{line}" for number, line in enumerate(lines, first))


def _format_size(size: int) -> str:
    power = min(max(size.bit_length() - 1, 0) // 10, len(_SIZES) - 1)
    shown = size / 1024**power
    return f"{shown:.0f}{_SIZES[power]}" if shown == int(shown) else f"{shown:.1f}{_SIZES[power]}"
