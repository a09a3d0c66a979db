package memstream

import (
	"encoding/base64"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

const (
	nameBytesMax = 128
	idBytesMax   = (nameBytesMax - 2) * 3 / 4 // that fit into a name, whatever the characters
	readable     = "u~"
	packed       = "b~"
)

var (
	plainID       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)
	escapedByte   = regexp.MustCompile(`[^A-Za-z0-9._-]`)
	escape        = regexp.MustCompile(`~([0-9a-f]{2})`)
	packedLetters = base64.RawURLEncoding.Strict()
)

// MemoryName returns the name of a user's memory, as the SDKs of all languages do; [UserIDOf] is the inverse. "bob" is
// bob, "bob@home" is u~bob~40home, and different ids have different names. It fails for an empty id, for one that is not
// UTF-8, and for one that does not fit into 128 characters: 94 bytes always fit.
func MemoryName(userID string) (string, error) {
	switch {
	case userID == "":
		return "", invalidField("user_id", "is empty")
	case !utf8.ValidString(userID):
		return "", invalidField("user_id", "is not UTF-8")
	case len(userID) <= nameBytesMax && plainID.MatchString(userID):
		return userID, nil
	}
	var escaped strings.Builder
	escaped.WriteString(readable)
	for _, each := range []byte(userID) {
		if each < utf8.RuneSelf && !escapedByte.Match([]byte{each}) {
			escaped.WriteByte(each)
		} else {
			fmt.Fprintf(&escaped, "~%02x", each)
		}
	}
	if escaped.Len() <= nameBytesMax {
		return escaped.String(), nil
	}
	if name := packed + packedLetters.EncodeToString([]byte(userID)); len(name) <= nameBytesMax {
		return name, nil
	}
	return "", invalidField("user_id", fmt.Sprintf("has %d bytes, but a name holds %d: shorten it, or name the memory by a "+
		"hash of it and store the id in a label", len(userID), idBytesMax))
}

// UserIDOf returns the user id of a name that [MemoryName] returned. It fails for any other name.
func UserIDOf(name string) (string, error) {
	id := name
	if rest, found := strings.CutPrefix(name, readable); found {
		id = escape.ReplaceAllStringFunc(rest, func(found string) string {
			var value byte
			fmt.Sscanf(found, "~%02x", &value)
			return string([]byte{value})
		})
	} else if rest, found := strings.CutPrefix(name, packed); found {
		if decoded, err := packedLetters.DecodeString(rest); err == nil {
			id = string(decoded)
		}
	}
	if made, err := MemoryName(id); err != nil || made != name {
		return "", invalidField("name", fmt.Sprintf("is %q, which MemoryName did not make", name))
	}
	return id, nil
}
