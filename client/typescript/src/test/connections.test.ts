/** More streams than a connection takes. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http2";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";

import { connectNodeAdapter } from "@connectrpc/connect-node";

import { StreamService } from "../gen/memstream/v1/stream_service_pb.js";
import { Link } from "../link.js";

void test("streams beyond a connection open others", async () => {
  const handler = connectNodeAdapter({
    routes: ({ service }) => service(StreamService, {
      async *watch(_request, context) {
        yield {};
        if (!context.signal.aborted) await once(context.signal, "abort");
      },
      recallOnce: () => ({}),
    }),
  });
  const server = createServer({ settings: { maxConcurrentStreams: 8 } }, handler);
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const address = server.address();
  assert(address !== null && typeof address === "object");
  const link = new Link(`127.0.0.1:${address.port}`, { timeoutMs: 20_000 });
  link.connections.allowCalls(8);
  const calls = (): number[] => link.connections.open.map((each) => each.calls);
  try {
    const stop = new AbortController();
    for (let number = 0; number < 30; number += 1) {
      const watch = link.streams.watch({}, { signal: stop.signal })[Symbol.asyncIterator]();
      assert.equal((await watch.next()).done, false);
    }
    await link.streams.recallOnce({});
    assert.deepEqual(calls(), [7, 7, 7, 7, 2]);
    stop.abort();
    while (calls().join() !== "0") await turn();
    await link.streams.recallOnce({});
  } finally {
    link.close();
    server.close();
  }
});
