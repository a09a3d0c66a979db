package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	memstream "memstream.dev/go"
	v1 "memstream.dev/go/memstream/v1"
)

// runSecure connects through a proxy that terminates mutual TLS and requires a token: with the token, with another token,
// without a certificate.
func runSecure(address, folder string) error {
	authority, err := os.ReadFile(filepath.Join(folder, "ca.pem"))
	if err != nil {
		return err
	}
	token, err := os.ReadFile(filepath.Join(folder, "token"))
	if err != nil {
		return err
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(folder, "client.pem"), filepath.Join(folder, "client.key"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	known := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}
	report("mutual TLS and a token", observeAndRecall(address, memstream.WithTLS(known), memstream.WithToken(string(token))))
	refused := observeAndRecall(address, memstream.WithTLS(known), memstream.WithToken("another"))
	if memstream.HasReason(refused, v1.ErrorReason_ERROR_REASON_UNAUTHENTICATED) {
		refused = nil
	} else {
		refused = fmt.Errorf("it failed with %w", refused)
	}
	report("another token", refused)
	unknown := observeAndRecall(address, memstream.WithTLS(&tls.Config{RootCAs: roots}), memstream.WithToken(string(token)))
	var failure *memstream.Error
	if errors.As(unknown, &failure) && failure.Transient() {
		unknown = nil
	} else {
		unknown = fmt.Errorf("it failed with %w", unknown)
	}
	report("no certificate", unknown)
	return nil
}

func observeAndRecall(address string, options ...memstream.Option) error {
	ctx, cancel := context.WithTimeout(context.Background(), readTime)
	defer cancel()
	client, err := memstream.Connect(address, append(options, memstream.WithRetry(memstream.Retry{First: time.Second}))...)
	if err != nil {
		return err
	}
	defer client.Close() //nolint:errcheck // no call is open any more
	memory, err := client.EnsureMemory(ctx, "secure/joy")
	if err != nil {
		return err
	}
	stream, err := memory.Observe(ctx, "go", memstream.ObserveOptions{})
	if err != nil {
		return err
	}
	defer stream.Abandon()
	if _, err := stream.Send(ctx, memstream.Text("green tea")); err != nil {
		return err
	}
	if err := stream.Close(ctx); err != nil {
		return err
	}
	_, err = memory.RecallOnce(ctx, memstream.TextQuery("tea"))
	return err
}
