/** Prints a memory's events from its beginning until `count` fragments were admitted to short-term. */
import { connect, EventType } from "@memstream/client";

const [target = "127.0.0.1:7700", count = "4"] = process.argv.slice(2);
const client = connect(target);
const joy = await client.ensureMemory("story/joy");
let left = Number(count);
for await (const { event, fragment } of joy.watch({ from: "beginning", includeFragments: true })) {
  console.log([EventType[event.type], fragment?.body.value].filter(Boolean).join(" "));
  if (event.type === EventType.ADMITTED && --left === 0) break;
}
client.close();
