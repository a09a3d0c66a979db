package memstream

import (
	"encoding/json"
	"os"
	"testing"
)

func TestNamesAreThoseOfAllLanguages(t *testing.T) {
	data, err := os.ReadFile("../../tests/conformance/user_ids.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Names        map[string]string
		RefusedIDs   []string `json:"refused_ids"`
		RefusedNames []string `json:"refused_names"`
	}
	if err := json.Unmarshal(data, &table); err != nil {
		t.Fatal(err)
	}
	if len(table.Names) < 10 || len(table.RefusedIDs) < 2 || len(table.RefusedNames) < 5 {
		t.Fatal("the table is incomplete")
	}
	for id, name := range table.Names {
		if made, err := MemoryName(id); err != nil || made != name {
			t.Errorf("%q: %q, %v; want %q", id, made, err, name)
		}
		if found, err := UserIDOf(name); err != nil || found != id {
			t.Errorf("%q: %q, %v; want %q", name, found, err, id)
		}
	}
	for _, id := range append(table.RefusedIDs, "\xff") {
		if made, err := MemoryName(id); err == nil {
			t.Errorf("%q became %q", id, made)
		}
	}
	for _, name := range table.RefusedNames {
		if id, err := UserIDOf(name); err == nil {
			t.Errorf("%q is of %q", name, id)
		}
	}
}
