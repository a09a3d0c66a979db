package memstream

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	v1 "memstream.dev/go/memstream/v1"
)

// listen serves each connection by a function, and returns its address.
func listen(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() }) //nolint:errcheck // the end of the test
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go handle(conn)
		}
	}()
	return listener.Addr().String()
}

func TestAnswerMayHaveMoreThanFourMegabytes(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
		return &v1.RecallOnceResponse{Done: &v1.RecallDone{QueryId: strings.Repeat("q", 6<<20)}}, nil
	}
	if _, err := memory.RecallOnce(ctx, TextQuery("tea")); err != nil {
		t.Fatal(err)
	}
}

func TestServerThatAnswersNoPingIsNoticed(t *testing.T) {
	before := pingTimeout
	pingTimeout = 300 * time.Millisecond
	t.Cleanup(func() { pingTimeout = before })
	address := listen(t, func(conn net.Conn) {
		conn.Write([]byte("\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x04\x01\x00\x00\x00\x00")) //nolint:errcheck // SETTINGS, and their acknowledgement
		buffer := make([]byte, 4_096)
		for {
			if _, err := conn.Read(buffer); err != nil {
				return
			}
		}
	})
	client, err := Connect(address, WithKeepalive(10*time.Second), WithRetry(Retry{Calls: -1})) // gRPC's minimum
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // the end of the test
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := client.Server.GetServerInfo(ctx, &v1.GetServerInfoRequest{}); status.Code(err) != codes.Unavailable {
		t.Fatalf("the error is %v", err)
	}
}

func TestClientReconnectsSoonAndGoesOn(t *testing.T) {
	attempts := make(chan struct{}, 100)
	address := listen(t, func(conn net.Conn) {
		attempts <- struct{}{}
		conn.Close() //nolint:errcheck // the client reconnects
	})
	client, err := Connect(address)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // the end of the test
	client.conn.open[0].Connect()
	late := time.After(time.Minute)
	waited := time.Hour
	for number := 1; number <= 6 || waited > 3*time.Second; number++ { // gRPC's own delays are five seconds and more by then
		before := time.Now()
		select {
		case <-attempts:
			client.conn.open[0].Connect()
		case <-late:
			t.Fatal("the client waits too long")
		}
		waited = time.Since(before)
	}
}
