package main

import (
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
)

var name = regexp.MustCompile(`\$\{(\w+)\}`)

// fillPlaceholders replaces each ${name} in value by the kept text; tests/conformance/matching.py has the rules.
func fillPlaceholders(value any, kept map[string]string) any {
	switch value := value.(type) {
	case string:
		return name.ReplaceAllStringFunc(value, func(found string) string { return kept[found[2:len(found)-1]] })
	case []any:
		made := make([]any, len(value))
		for place, each := range value {
			made[place] = fillPlaceholders(each, kept)
		}
		return made
	case map[string]any:
		if text, ok := value["repeat"].(string); ok {
			return strings.Repeat(text, int(value["times"].(float64)))
		}
		made := map[string]any{}
		for key, each := range value {
			made[fillPlaceholders(key, kept).(string)] = fillPlaceholders(each, kept)
		}
		return made
	}
	return value
}

// compare returns an error if an answer is not as expected.
func compare(expected, actual any, where string) error {
	switch expected := expected.(type) {
	case map[string]any:
		if least, ok := expected["min"].(float64); ok && len(expected) == 1 {
			if got, err := strconv.ParseFloat(fmt.Sprint(actual), 64); err != nil || got < least {
				return fmt.Errorf("%s is %v", where, actual)
			}
			return nil
		}
		fields, ok := actual.(map[string]any)
		if !ok {
			return fmt.Errorf("%s is %v", where, actual)
		}
		for key, each := range expected {
			if err := compare(each, fields[key], where+"."+key); err != nil {
				return err
			}
		}
		return nil
	case []any:
		items, _ := actual.([]any)
		if len(items) != len(expected) {
			return fmt.Errorf("%s has %d items: %v", where, len(items), actual)
		}
		for place, each := range expected {
			if err := compare(each, items[place], fmt.Sprintf("%s[%d]", where, place)); err != nil {
				return err
			}
		}
		return nil
	}
	if !reflect.DeepEqual(expected, actual) {
		return fmt.Errorf("%s is %v, expected %v", where, actual, expected)
	}
	return nil
}

// valueAt returns the value at a dotted path of an answer.
func valueAt(actual any, path string) string {
	for _, part := range strings.Split(path, ".") {
		if items, ok := actual.([]any); ok {
			place, err := strconv.Atoi(part)
			if err != nil || place >= len(items) {
				return ""
			}
			actual = items[place]
			continue
		}
		fields, _ := actual.(map[string]any)
		actual = fields[part]
	}
	return fmt.Sprint(actual)
}
