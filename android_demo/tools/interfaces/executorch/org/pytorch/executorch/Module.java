package org.pytorch.executorch;

/** Signatures only; see the README of this folder. */
public class Module {
    public static final int LOAD_MODE_MMAP = 1;

    public static Module load(String path, int loadMode, int threads) {
        throw new UnsupportedOperationException("signatures only");
    }

    public EValue[] execute(String method, EValue... inputs) {
        throw new UnsupportedOperationException("signatures only");
    }

    public void destroy() {
        throw new UnsupportedOperationException("signatures only");
    }
}
