// Package memstream is the client of memstream, a memory server for agents: durable observation streams, tiered
// memory and explained recall over gRPC.
//
// [Connect] returns a [Client] with the generated clients of every service. Their calls carry the token and the routing
// header and fail with an [*Error]. [Client.Memory] returns a [Memory] with three streams: [Memory.Observe] numbers
// observations and delivers each exactly once over any number of connections, [Memory.Recall] has many queries in
// flight, [Memory.Watch] returns every event once. Everything is safe for concurrent use, except a [Watch].
package memstream
