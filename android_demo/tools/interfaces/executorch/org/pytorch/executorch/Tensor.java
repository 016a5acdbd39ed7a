package org.pytorch.executorch;

/** Signatures for a compiler; see the README of this folder. */
public class Tensor {
    private final Object data;

    private Tensor(Object data) {
        this.data = data;
    }

    public static Tensor fromBlob(long[] data, long[] shape) {
        return new Tensor(data);
    }

    public static Tensor fromBlob(float[] data, long[] shape) {
        return new Tensor(data);
    }

    public long[] getDataAsLongArray() {
        return (long[]) data;
    }

    public float[] getDataAsFloatArray() {
        return (float[]) data;
    }
}
