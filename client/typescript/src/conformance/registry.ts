/** Every message and service of the contract, by name. */
import { createRegistry } from "@bufbuild/protobuf";

import { file_google_rpc_error_details } from "../gen/google/rpc/error_details_pb.js";
import { file_memstream_v1_block_service } from "../gen/memstream/v1/block_service_pb.js";
import { file_memstream_v1_context_service } from "../gen/memstream/v1/context_service_pb.js";
import { file_memstream_v1_conversation_service } from "../gen/memstream/v1/conversation_service_pb.js";
import { file_memstream_v1_error } from "../gen/memstream/v1/error_pb.js";
import { file_memstream_v1_event } from "../gen/memstream/v1/event_pb.js";
import { file_memstream_v1_fragment } from "../gen/memstream/v1/fragment_pb.js";
import { file_memstream_v1_memory } from "../gen/memstream/v1/memory_pb.js";
import { file_memstream_v1_memory_service } from "../gen/memstream/v1/memory_service_pb.js";
import { file_memstream_v1_operation } from "../gen/memstream/v1/operation_pb.js";
import { file_memstream_v1_operation_service } from "../gen/memstream/v1/operation_service_pb.js";
import { file_memstream_v1_scope } from "../gen/memstream/v1/scope_pb.js";
import { file_memstream_v1_server_service } from "../gen/memstream/v1/server_service_pb.js";
import { file_memstream_v1_stream_service } from "../gen/memstream/v1/stream_service_pb.js";

export const registry = createRegistry(
  file_google_rpc_error_details,
  file_memstream_v1_block_service,
  file_memstream_v1_context_service,
  file_memstream_v1_conversation_service,
  file_memstream_v1_error,
  file_memstream_v1_event,
  file_memstream_v1_fragment,
  file_memstream_v1_memory,
  file_memstream_v1_memory_service,
  file_memstream_v1_operation,
  file_memstream_v1_operation_service,
  file_memstream_v1_scope,
  file_memstream_v1_server_service,
  file_memstream_v1_stream_service,
);
