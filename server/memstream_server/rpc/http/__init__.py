"""The HTTP port: Connect, gRPC-Web and JSON over the handlers, rights and limits of the gRPC server.

| module | |
|---|---|
| call | one HTTP request as the context that the handlers and interceptors get |
| codecs | JSON and binary bodies, bounded before they are parsed; statuses as errors of Connect |
| long_strings | a JSON text without its long strings, which are read in pieces |
| endpoints | the rpcs as endpoints of ConnectRPC: identity first, then the body, then the handler |
| event_stream | Watch, WatchMessages and standing queries as text/event-stream |
| application | the ASGI application: hosts, origins, headers, health |
| listener | the socket by the settings: TLS, start, graceful stop, waiting connections, client certificates |
| pages | the console's files, the metrics at `/metrics`, and what their caller may do |
| port | what this port shares with the gRPC server |
"""
