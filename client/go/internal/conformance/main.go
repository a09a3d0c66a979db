// Command conformance runs the cases and golden bytes of tests/conformance with the Go client.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
)

var stdin = bufio.NewReader(os.Stdin)

func main() {
	what, address, files := os.Args[1], os.Args[2], os.Args[3:]
	if what == "secure" {
		if err := secure(address, files[0]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && what == "golden" {
			err = golden(text)
		} else if err == nil {
			err = cases(address, text)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func report(name string, err error) {
	wrong := ""
	if err != nil {
		wrong = err.Error()
	}
	say(map[string]any{"case": name, "wrong": wrong})
}

func say(what map[string]any) {
	text, err := json.Marshal(what)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(text))
}

// ask has the server killed or stopped and started again, or all connections cut.
func ask(what string) error {
	say(map[string]any{"ask": what})
	_, err := stdin.ReadString('\n')
	return err
}
