/** Uses the generated messages with @grpc/grpc-js instead of Connect, for programs that already use it. */
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { credentials, Client } from "@grpc/grpc-js";

import { ServerService } from "../gen/memstream/v1/server_service_pb.js";
import { StreamService } from "../gen/memstream/v1/stream_service_pb.js";

const [address = ""] = process.argv.slice(2);
const client = new Client(address, credentials.createInsecure());

function call<M extends DescMethodUnary>(method: M, request: MessageInitShape<M["input"]>): Promise<MessageShape<M["output"]>> {
  return new Promise((resolve, reject) => {
    client.makeUnaryRequest(
      `/${method.parent.typeName}/${method.name}`,
      (message: MessageShape<M["input"]>) => Buffer.from(toBinary(method.input, message)),
      (bytes: Buffer) => fromBinary(method.output, bytes) as MessageShape<M["output"]>,
      create(method.input, request) as MessageShape<M["input"]>,
      (error, answer) => {
        if (answer === undefined) reject(error ?? new Error("no answer"));
        else resolve(answer);
      },
    );
  });
}

const info = await call(ServerService.method.getServerInfo, {});
console.log(info.embedding?.name);

const observe = StreamService.method.observe;
const stream = client.makeBidiStreamRequest(
  `/${observe.parent.typeName}/${observe.name}`,
  (message: MessageShape<typeof observe.input>) => Buffer.from(toBinary(observe.input, message)),
  (bytes: Buffer) => fromBinary(observe.output, bytes),
);
stream.write(create(observe.input, { message: { case: "open", value: { namespace: "js", memory: "nowhere", producer: "p" } } }));
stream.on("data", () => undefined);
stream.on("error", (error) => {
  console.log(error.message);
  client.close();
});
