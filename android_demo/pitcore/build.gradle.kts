import org.jetbrains.kotlin.gradle.dsl.JvmTarget

plugins {
    alias(libs.plugins.kotlin.jvm)
}

java {
    sourceCompatibility = JavaVersion.VERSION_17
    targetCompatibility = JavaVersion.VERSION_17
}

kotlin {
    compilerOptions {
        jvmTarget = JvmTarget.JVM_17
    }
}

// The schema of manifest.json is the one that Python reads. A copy of this project elsewhere needs the file too.
sourceSets.main {
    resources.srcDir("../../pit_deploy/schemas")
}

dependencies {
    testImplementation(libs.junit)
}

tasks.test {
    systemProperty("vectors", rootDir.resolve("../runtime_tests/vectors").path)
}
