//go:build tools

// Package engine holds the layers of the engine; see docs/architecture.md.
//
// This file keeps modules in go.mod whose importer comes with topo.
package engine

import (
	_ "github.com/Mellanox/rdmamap"
	_ "github.com/NVIDIA/go-nvml/pkg/nvml"
)
