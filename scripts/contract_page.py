"""docs/api.md: every service, message and enum of the contract with its comment, from protos/memstream/v1."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files as resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
FIRST = (
    "stream_service",
    "memory_service",
    "block_service",
    "conversation_service",
    "context_service",
    "operation_service",
    "server_service",
)
"""The services come first; the other files follow."""

HEAD = """# API

Every rpc, message and field of the contract, with its comment. `make generate` writes this page from
[protos/memstream/v1](../protos/memstream/v1), and a test compares them. [Errors](errors.md) lists the reasons
of failures with their codes.

Code for another language comes from protoc, or buf, in a clone. The contract imports two files of googleapis, which
[third_party](../third_party) has:

<!-- no-run: tests/test_docs.py runs it with the protoc of grpcio-tools -->
```sh
protoc -I protos -I third_party/googleapis --python_out=. protos/memstream/v1/*.proto
```

An `optional` field records whether it was set; at most one field of a *oneof* is set. A `repeated` field is a list.
"""


def contract_page() -> str:
    """The page for the current files. Raises SystemExit with protoc's code if it rejects them."""
    return HEAD + "".join("\n" + _file_section(file) for file in sorted(compile_protos(), key=file_order))


def reasons() -> list[tuple[str, str]]:
    """(name without its prefix, comment in one line) of every value of ErrorReason but the unspecified one."""
    file = next(file for file in compile_protos() if file.name.endswith("/error.proto"))
    comments = Comments(file)
    values = enumerate(file.enum_type[0].value)
    lines = [
        (value.name, comments.line(FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, 0, 2, place)) for place, value in values
    ]
    return [(name.removeprefix("ERROR_REASON_"), line) for name, line in lines[1:]]


def compile_protos() -> list[FileDescriptorProto]:
    """The files of the contract with their comments. Raises SystemExit with protoc's code if it rejects them."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    roots = (PROTOS, ROOT / "third_party" / "googleapis", resources("grpc_tools") / "_proto")
    with tempfile.NamedTemporaryFile() as out:
        paths = (f"--proto_path={root}" for root in roots)
        code = protoc.main(["protoc", *paths, "--include_source_info", f"--descriptor_set_out={out.name}", *sources])
        if code:
            raise SystemExit(code)
        return list(FileDescriptorSet.FromString(Path(out.name).read_bytes()).file)


def file_order(file: FileDescriptorProto) -> tuple[int, str]:
    """Sorts the services first."""
    name = Path(file.name).stem
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


class Comments:
    """The comments of a file, by the path of the element they precede (see SourceCodeInfo in descriptor.proto)."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._found = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}

    def paragraphs(self, *path: int) -> str:
        """The comment of an element."""
        lines = (line.removeprefix(" ") for line in self._found.get(path, "").splitlines())
        return "\n".join(lines).strip()

    def line(self, *path: int) -> str:
        """The comment in one line, for a table."""
        return " ".join(self.paragraphs(*path).split()).replace("|", "\\|")


def _file_section(file: FileDescriptorProto) -> str:
    comments = Comments(file)
    # The comment before `syntax` (field 12) belongs to the file.
    parts = [f"## {Path(file.name).name}\n", comments.paragraphs(FileDescriptorProto.SYNTAX_FIELD_NUMBER) + "\n"]
    for place, service in enumerate(file.service):
        path = (FileDescriptorProto.SERVICE_FIELD_NUMBER, place)
        parts += [f"### {service.name}\n", comments.paragraphs(*path) + "\n"]
        for number, method in enumerate(service.method):
            parts += [f"#### {service.name}.{method.name}\n", _call_signature(method) + "\n"]
            parts.append(comments.paragraphs(*path, 2, number) + "\n")
    for place, message in enumerate(file.message_type):
        parts += _message_lines(message, comments, FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, place)
    for place, enum in enumerate(file.enum_type):
        parts += _enum_lines(enum, comments, FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, place)
    return "\n".join(parts)


def _call_signature(method: MethodDescriptorProto) -> str:
    request, response = _type_link(method.input_type), _type_link(method.output_type)
    asked = f"a stream of {request}" if method.client_streaming else request
    answered = f"a stream of {response}" if method.server_streaming else response
    return f"{asked} → {answered}"


def _message_lines(message: DescriptorProto, comments: Comments, *path: int) -> Iterator[str]:
    yield f"### {message.name}\n"
    yield comments.paragraphs(*path) + "\n"
    if message.field:
        rows = (
            f"| `{field.name}` | {field.number} | {_field_type(field, message)} | {comments.line(*path, 2, number)} |\n"
            for number, field in enumerate(message.field)
        )
        yield "| field | number | type | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _enum_lines(enum: EnumDescriptorProto, comments: Comments, *path: int) -> Iterator[str]:
    yield f"### {enum.name}\n"
    yield comments.paragraphs(*path) + "\n"
    rows = (
        f"| `{value.name}` | {value.number} | {comments.line(*path, 2, number)} |\n"
        for number, value in enumerate(enum.value)
    )
    yield "| value | number | meaning |\n|---|---|---|\n" + "".join(rows)


def _field_type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    entry = next((one for one in message.nested_type if field.type_name.endswith(f".{message.name}.{one.name}")), None)
    if entry is not None and entry.options.map_entry:
        key, value = entry.field
        return f"map of {_scalar_type(key)} to {_scalar_type(value)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {_scalar_type(field)}"
    if field.proto3_optional:
        return f"optional {_scalar_type(field)}"
    if field.HasField("oneof_index"):
        return f"{_scalar_type(field)}, oneof `{message.oneof_decl[field.oneof_index].name}`"
    return _scalar_type(field)


def _scalar_type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _type_link(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _type_link(full: str) -> str:
    package, _, name = full.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == "memstream.v1" else f"`{package}.{name}`"
