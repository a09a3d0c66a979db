"""Files, services and methods of the contract, from the generated code: a list by hand misses the newest."""

from __future__ import annotations

import importlib
import pkgutil

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor

from memstream import v1

FILES: list[FileDescriptor] = [
    importlib.import_module(f"{v1.__name__}.{module.name}").DESCRIPTOR
    for module in pkgutil.iter_modules(v1.__path__)
    if module.name.endswith("_pb2")
]
SERVICES: list[ServiceDescriptor] = [service for file in FILES for service in file.services_by_name.values()]
METHODS: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]
