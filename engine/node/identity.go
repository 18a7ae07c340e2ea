package node

import (
	"errors"

	"fserver/engine/conf"
	"fserver/engine/transport/tcp"
	"fserver/engine/wire"
)

// identity is who a node is to peers over TLS; nil where TLS is off.
func identity(cfg *conf.Config) (*tcp.Identity, error) {
	switch {
	case !cfg.TLS:
		return nil, nil
	case cfg.TLSCert.Path == "":
		return tcp.SharedIdentity(cfg.Secret.Bytes(), cfg.Cluster)
	}
	return tcp.FileIdentity(cfg.TLSCert.Text.Bytes(), cfg.TLSKey.Text.Bytes(), cfg.TLSCA.Text.Bytes())
}

// refusal says whether err comes from settings that do not fit each other, so
// that trying again does not help.
func refusal(err error) bool {
	var gate *wire.HandshakeError
	var tls *tcp.TLSError
	return errors.As(err, &gate) || errors.As(err, &tls)
}
