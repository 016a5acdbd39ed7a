plugins {
    alias(libs.plugins.android.library)
}

android {
    namespace = "org.pitdeploy.runtime"
    compileSdk = 36

    defaultConfig {
        minSdk = 26
    }

    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

dependencies {
    api(project(":pitcore"))
    implementation(libs.onnxruntime)
    implementation(libs.executorch)
    testImplementation(libs.junit)
}
