// Command conformance runs the cases and golden messages of tests/conformance with the Go client.
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
		if err := runSecure(address, files[0]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && what == "golden" {
			err = runGolden(text)
		} else if err == nil {
			err = runCases(address, text)
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
	printLine(map[string]any{"case": name, "wrong": wrong})
}

func printLine(what map[string]any) {
	text, err := json.Marshal(what)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(text))
}

// requestFault requests a fault from the test: the server is killed or stopped and restarted, or all connections are cut.
func requestFault(what string) error {
	printLine(map[string]any{"ask": what})
	_, err := stdin.ReadString('\n')
	return err
}
