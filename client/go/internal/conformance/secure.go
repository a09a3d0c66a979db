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

// secure talks through a front that ends mutual TLS and asks for a token: with it, with another, without a certificate.
func secure(address, folder string) error {
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
	report("mutual TLS and a token", talk(address, memstream.WithTLS(known), memstream.WithToken(string(token))))
	refused := talk(address, memstream.WithTLS(known), memstream.WithToken("another"))
	if memstream.HasReason(refused, v1.ErrorReason_ERROR_REASON_UNAUTHENTICATED) {
		refused = nil
	} else {
		refused = fmt.Errorf("it was %w", refused)
	}
	report("another token", refused)
	unknown := talk(address, memstream.WithTLS(&tls.Config{RootCAs: roots}), memstream.WithToken(string(token)))
	var said *memstream.Error
	if errors.As(unknown, &said) && said.Transient() {
		unknown = nil
	} else {
		unknown = fmt.Errorf("it was %w", unknown)
	}
	report("no certificate", unknown)
	return nil
}

func talk(address string, options ...memstream.Option) error {
	ctx, cancel := context.WithTimeout(context.Background(), readTime)
	defer cancel()
	client, err := memstream.Connect(address, append(options, memstream.WithRetry(memstream.Retry{First: time.Second}))...)
	if err != nil {
		return err
	}
	defer client.Close() //nolint:errcheck // nothing is on it any more
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
	_, err = memory.RecallOnce(ctx, memstream.Asking("tea"))
	return err
}
