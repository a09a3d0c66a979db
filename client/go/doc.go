// Package memstream is the client of memstream, a memory server for agents: durable observation streams, tiered
// memory and explained recall over gRPC.
//
// [Connect] gives a [Client] with the generated clients of every service, whose calls carry the token and the routing
// header and fail with an [*Error]. [Client.Memory] gives a [Memory] with the three streams: [Memory.Observe] numbers
// observations and delivers each exactly once over any number of connections, [Memory.Recall] has many queries in
// flight, [Memory.Watch] gives every event once. All of it is safe for use by many goroutines, except a [Watch].
package memstream
