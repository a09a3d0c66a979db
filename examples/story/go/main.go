// Command story asks a memory two questions concurrently on one stream.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"sync"

	memstream "memstream.dev/go"
)

var questions = []string{"Where did Bob move to?", "Who teaches the cello?"}

func main() {
	target := "127.0.0.1:7700"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	if err := ask(context.Background(), target); err != nil {
		log.Fatal(err)
	}
}

func ask(ctx context.Context, target string) error {
	client, err := memstream.Connect(target)
	if err != nil {
		return err
	}
	defer client.Close()
	joy, err := client.Memory("story/joy")
	if err != nil {
		return err
	}
	stream, err := joy.Recall(ctx, "")
	if err != nil {
		return err
	}
	answers, failures := make([]*memstream.Answer, len(questions)), make([]error, len(questions))
	var asked sync.WaitGroup
	for place, question := range questions {
		asked.Go(func() { answers[place], failures[place] = stream.Query(ctx, memstream.TextQuery(question)) })
	}
	asked.Wait()
	for place, question := range questions {
		if failures[place] != nil {
			return failures[place]
		}
		best := answers[place].Recollections[0]
		fmt.Printf("%s %s: %s\n", question, best.GetFragment().GetSpeaker(), best.GetFragment().GetContent())
	}
	return stream.Close(ctx)
}
