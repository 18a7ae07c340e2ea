package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func shared(tb testing.TB, secret string) *Identity {
	id, err := SharedIdentity([]byte(secret), "default")
	require.NoError(tb, err)
	return id
}
